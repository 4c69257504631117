"""What of ours runs inside a call of the program goes through an ErrorGuard: an error of ours never reaches the program. Runs in the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks.recording.calls import Args, Function, Kwargs


class ErrorGuard:
    """Runs steps of ours; `on_error` gets what they raise, and must not raise itself."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self.active = True  # False: no step is run any more

    def __call__(self, step: Function, *args: object) -> Any:
        """What a step returns; None when it failed, or none is run any more."""
        try:
            return step(*args) if self.active else None
        except Exception as error:  # ours, or of a device that is broken; never the program's
            self._on_error(error)
            return None

    def hold(self, step: Function) -> Function:
        """The same step, for others to call."""
        return lambda *args: self(step, *args)

    def around(
        self,
        original: Function,
        before: Callable[[Args, Kwargs], Any],
        after: Callable[[Any, Any], object] | None = None,
        failed: Callable[[Any, BaseException], object] | None = None,
    ) -> Function:
        """`original` with a step before and after it. `before(args, kwargs)` gives what `after(it, result)` and
        `failed(it, error)` need; when it gives None there is nothing to do afterwards."""
        guard = self

        def wrapper(*args: object, **kwargs: object) -> object:
            known = guard(before, args, kwargs)
            if known is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if failed is not None:
                    guard(failed, known, error)
                raise
            if after is not None:
                guard(after, known, result)
            return result

        return wrapper
