"""Makes grammars that nodes can compile from the forms that clients ask for. Hostile ones are refused here, by name.

A child process makes and compiles each grammar first (`router.api.grammar_child`). A grammar that takes too long or
kills the child is refused, and the next one gets a new child. Forms that were asked for lately are not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from hackkv.errors import DeadlineExceeded, HackkvError, Overloaded, RequestError, Unavailable
from router.api.structured import Form

KEPT_VERDICTS: Final = 256
MAX_WAITING: Final = 64
"""Forms that wait for the child; one more is a 429."""
START_S: Final = 60.0
"""Time that a child gets to read the tokenizer."""
MAX_LINE: Final = 4 << 20

Verdict = tuple[str, str]
"""A grammar, or why there is none."""


class Grammars:
    """Grammars of forms. The child starts with the first one; `close` ends it."""

    def __init__(self, folder: Path, compile_s: float) -> None:
        """`folder` holds tokenizer.json; `compile_s` limits the seconds that one grammar may take."""
        self._command = (sys.executable, "-P", "-m", "router.api.grammar_child", str(folder))
        self._compile_s = compile_s
        self._verdicts: OrderedDict[Form, asyncio.Task[Verdict]] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._child: Process | None = None

    async def grammar(self, form: Form) -> str:
        """The grammar of a form, in llguidance's form.

        Raises `RequestError` naming the form's field if it is wrong or costs too much, `Overloaded` if too many wait,
        and `Unavailable` if grammars cannot be compiled for this model at all.
        """
        verdict = self._verdicts.get(form)
        if verdict is None:
            waiting = sum(not each.done() for each in self._verdicts.values())
            if waiting >= MAX_WAITING:
                raise Overloaded(f"{waiting} grammars wait to be compiled")
            verdict = self._verdicts[form] = asyncio.create_task(self._try(form))
            verdict.add_done_callback(lambda task: self._forget(form, task))
        self._verdicts.move_to_end(form)
        # Others may wait for the same verdict, so it is not cancelled with the first who asked.
        grammar, fault = await asyncio.shield(verdict)
        if fault:
            raise RequestError(f"{form.param}: {fault}", form.param)
        return grammar

    async def close(self) -> None:
        """End the child."""
        tasks = list(self._verdicts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_child()

    def _forget(self, form: Form, task: asyncio.Task[Verdict]) -> None:
        """Keep the latest verdicts. A form without a verdict is tried again by whoever asks next."""
        if task.cancelled() or task.exception() is not None:
            self._verdicts.pop(form, None)
        done = [form for form, each in self._verdicts.items() if each.done()]
        for old in done[: max(0, len(done) - KEPT_VERDICTS)]:
            del self._verdicts[old]

    async def _try(self, form: Form) -> Verdict:
        async with self._one_at_a_time:
            return await self._ask(form)

    async def _ask(self, form: Form) -> Verdict:
        child = await self._started()
        line = json.dumps(
            {"kind": form.kind, "text": form.text, "lenient": form.lenient, "thinking": form.thinking.value}
        )
        try:
            async with asyncio.timeout(self._compile_s):
                answer = await _exchange(child, line)
        except TimeoutError:
            await self._end_child()
            return "", f"takes more than {self._compile_s:g} s to compile"
        except BaseException:
            await self._end_child()
            raise
        if answer is None:
            await self._end_child()
            return "", "is too large or too deeply nested to compile"
        return answer.get("grammar", ""), answer.get("error", "")

    async def _started(self) -> Process:
        if self._child is not None:
            return self._child
        self._child = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE)
        try:
            async with asyncio.timeout(START_S):
                ready = await _exchange(self._child)
        except TimeoutError as error:
            await self._end_child()
            raise DeadlineExceeded("the compiler of grammars did not start in time") from error
        except BaseException:
            await self._end_child()
            raise
        if ready is None:
            await self._end_child()
            raise Unavailable("grammars cannot be compiled for this model's tokenizer; the router's log says why")
        return self._child

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


async def _exchange(child: Process, line: str = "") -> dict[str, Any] | None:
    """The child's next line, after it got `line`; None if it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if line:
            child.stdin.write(line.encode() + b"\n")
            await child.stdin.drain()
        data = await child.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return None
    except ValueError as error:
        raise HackkvError("the compiler of grammars answered with too long a line") from error
    return json.loads(data) if data.endswith(b"\n") else None
