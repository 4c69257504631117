"""What pyproject.toml cannot say: allranks_record.pth is installed beside the package, where Python reads it."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    def run(self) -> None:
        super().run()
        editable = self.distribution.get_command_obj(
            "install"
        ).install_lib  # the wheel of an editable install
        folder = editable if self.editable_mode else self.build_lib
        self.copy_file("src/allranks/recording/allranks_record.pth", folder)


setup(cmdclass={"build_py": BuildWithPth})
