"""How a campaign of an external simulator runs: executor, time limit, attempts, chunks."""

import dataclasses
from concurrent.futures import Executor, ThreadPoolExecutor

from consilience.model.command import Command
from consilience.model.external import External


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a campaign runs; nothing here changes its numbers.

    `timeout`: seconds for each run. `retry`: further attempts at a run that failed.
    `chunk`: runs sent together. `in_flight`: chunks sent out at a time.
    """

    executor: Executor | None = None
    timeout: float | None = None
    retry: int = 0
    chunk: int | None = None
    in_flight: int | None = None
    progress: bool = True

    def check(self, external: External):
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be seconds above zero, got {self.timeout}.")
        if self.retry < 0:
            raise ValueError(f"retry must be a number of further attempts, got {self.retry}.")
        for name in ("chunk", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least one, got {value}.")
        function = not isinstance(external.function, Command)
        if function and self.timeout and isinstance(self.executor, ThreadPoolExecutor):
            raise ValueError(
                "A Python function cannot be stopped in a thread: for a time limit leave executor "
                "out, or pass a ProcessPoolExecutor."
            )
