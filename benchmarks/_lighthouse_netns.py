"""A network namespace joined to ours by a veth pair, whose packets nftables can drop. Needs root, ip and nft."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType


class Namespace:
    """`prefix` runs a command inside, `host` is our address as seen from there."""

    def __init__(self) -> None:
        number = os.getpid() % 200
        self.name = f"allranks-bench{os.getpid()}"
        self.host, self._guest = f"10.214.{number}.1", f"10.214.{number}.2"
        self._link = f"ab{os.getpid() % 100000}"
        self.prefix = ("ip", "netns", "exec", self.name)

    def __enter__(self) -> Namespace:
        try:
            _run("ip", "netns", "add", self.name)
            _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _run("ip", "addr", "add", f"{self.host}/24", "dev", self._link)
            _run("ip", "link", "set", self._link, "up")
            _run(*self.prefix, "ip", "addr", "add", f"{self._guest}/24", "dev", "eth0")
            _run(*self.prefix, "ip", "link", "set", "eth0", "up")
            _run(*self.prefix, "nft", "add", "table", "inet", "cut")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, timeout=30, check=False)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, timeout=30, check=False)

    def cut(self, pid: int = 0) -> None:
        """Nothing goes in or out any more, not even a close."""
        chains = "".join(
            f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; policy drop; }}\n"
            for hook in ("input", "output")
        )
        subprocess.run(
            [*self.prefix, "nft", "-f", "-"],
            input=chains,
            text=True,
            check=True,
            capture_output=True,
            timeout=30,
        )

    def mend(self) -> None:
        """Everything passes again."""
        _run(*self.prefix, "nft", "flush", "ruleset")
        _run(*self.prefix, "nft", "add", "table", "inet", "cut")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)
