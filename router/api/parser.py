"""A process that parses large bodies, so that the router's event loop never does.

The router forks it while the router has one thread, so both share the tokenizer. If it dies, it is started anew with
`python -m router.api.parser MODEL`. It holds one end of a socket pair (`control`, or standard input), over which the
router sends the socket of each job. The process forks a child for each job. The child gives its memory back by ending,
can be ended in the middle of anything, and shares the tokenizer with its parent without a copy. When the router closes
a job's socket (its client left, or a deadline passed) the child ends at once. When the router closes its end, this
process ends.

Messages are those of `router.packets`. A job is a `ParseJob` and the body; the answer is
`{"rest": ..., "lengths": [...]}` and the token ids of all prompts as 32-bit numbers, `{}` and the JSON that answers a
question (`router.api.texts`), or `{"error": {...}}`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from hackkv.errors import HackkvError, RequestError
from hackkv.heap import trim
from hackkv.tokenizer import Tokenizer
from router.api.conversation import Conversations
from router.api.errors import HTTPError
from router.api.fair_line import LARGE
from router.api.messages.schema import CountRequest, MessagesRequest
from router.api.responses.schema import ResponsesRequest
from router.api.schema import ChatRequest, CompletionRequest
from router.api.strict import Body, Prompted
from router.api.texts import QUESTIONS, Question, answer_question
from router.api.tokenize import Bounds, tokenize, validate
from router.config import ChatConfig
from router.packets import LENGTH, pack

IDS: Final = "I"
MAX_REST: Final = 1 << 20
"""The most bytes of a body beside its prompts. The router reads them on its event loop."""
NICENESS: Final = 5
"""Streams come first when cores are short."""
LARGE_NICENESS: Final = 15
"""A large body (`fair_line.LARGE`) may take seconds. Its child gets what the router and other children leave."""

_BODIES: Final[tuple[type[Body], ...]] = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest, *QUESTIONS,
)  # fmt: skip
KINDS: Final = {kind.__name__: kind for kind in _BODIES}


@dataclass(frozen=True, slots=True)
class ParseJob:
    """A job of a child: a body to read."""

    kind: str
    model_name: str
    bounds: Bounds
    chat: ChatConfig
    strict: bool


def answer(tokenizer: Tokenizer, job: ParseJob, data: bytes) -> tuple[dict[str, Any], bytes]:
    """Do a job. Returns the head of the answer, and the bytes that follow it."""
    try:
        body = validate(KINDS[job.kind], data, job.model_name, job.strict)
        conversations = Conversations(tokenizer, job.chat)
        if isinstance(body, Question):
            return {}, answer_question(conversations, body, job.bounds)
        assert isinstance(body, Prompted)
        prompts = tokenize(conversations, body, job.bounds)
        rest = _rest(body, data)
    except HTTPError as error:
        return {"error": {"status": error.status, "message": str(error), "code": error.code, "param": error.param}}, b""
    except RequestError as error:
        return {"error": {"status": 400, "message": str(error), "code": error.code, "param": error.param}}, b""
    ids = array(IDS)
    for prompt in prompts:
        ids.extend(prompt)
    return {"rest": rest, "lengths": [len(prompt) for prompt in prompts]}, ids.tobytes()


def _rest(body: Prompted, data: bytes) -> str:
    """The client's JSON with stand-ins for its prompts (`Prompted.stand_in`)."""
    fields = from_json(data)
    try:
        bare = json.dumps({**fields, **body.stand_in(repeated=False)})
        rest = json.dumps({**fields, **body.stand_in(repeated=True)})
    except ValueError as error:  # a number of more than 4300 digits, which Python does not write
        raise RequestError(f"the body cannot be read: {error}") from error
    if len(bare) > MAX_REST:
        raise RequestError(f"without its prompts the body is larger than {MAX_REST} bytes")
    return rest


def main(tokenizer: Tokenizer, control: socket.socket) -> int:
    """Fork a child for each socket that comes, until no more can come."""
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time: threads of their own would only cost memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the router, which then closes `control`
    trim()
    gc.freeze()  # a child that collects garbage must not copy its parent's pages
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return 0
        with socket.socket(fileno=descriptors[0]) as job:
            if os.fork() == 0:
                _child(tokenizer, control, job)


def _child(tokenizer: Tokenizer, control: socket.socket, job: socket.socket) -> None:
    """Do one job and end the process."""
    code = 1
    try:
        control.close()
        job.setblocking(True)
        _serve(tokenizer, job)
        code = 0
    except ConnectionError:
        pass  # the router gave the job up
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(tokenizer: Tokenizer, job: socket.socket) -> None:
    lengths = LENGTH.unpack(_receive(job, LENGTH.size))
    if lengths[1] >= LARGE:
        os.nice(LARGE_NICENESS - NICENESS)
    head, data = (_receive(job, length) for length in lengths)
    asked = json.loads(head)
    threading.Thread(target=_end_with, args=(job,), daemon=True).start()
    result, rest = answer(tokenizer, _job(asked), data)
    job.sendall(pack(result, rest))
    job.sendall(rest)


def _job(told: dict[str, Any]) -> ParseJob:
    """Inverse of `job_head`."""
    return ParseJob(**told | {"bounds": Bounds(**told["bounds"]), "chat": ChatConfig(**told["chat"])})


def _end_with(job: socket.socket) -> None:
    """End this process when the router closes the job."""
    poll = select.poll()
    poll.register(job, 0)  # a hang-up is reported in any case
    poll.poll()
    os._exit(1)


def _receive(source: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        count = source.recv_into(view[have:])
        if count == 0:
            raise ConnectionResetError("the router closed the job")
        have += count
    return bytes(data)


def job_head(job: ParseJob) -> dict[str, Any]:
    """A job as the JSON object of its message."""
    return asdict(job) | {"chat": job.chat.model_dump()}


def error_of(told: dict[str, Any]) -> HackkvError | HTTPError:
    """The error that a child answered with."""
    if told["status"] == 400:
        return RequestError(told["message"], told["param"])
    return HTTPError(told["status"], told["message"], told["code"], told["param"])


if __name__ == "__main__":
    sys.exit(main(Tokenizer(Path(sys.argv[1])), socket.socket(fileno=sys.stdin.fileno())))
