"""``inlay chat``: asks a model questions in the terminal, about documents that are read from the cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.chat_session import NAMES, ChatSession
from inlay.cli.documents import SCHEMA_SUFFIXES, DocumentChat, is_schema, plain_text, read_documents
from inlay.cli.options import announce_hub
from inlay.cli.settings import Options, with_settings
from inlay.errors import InlayError, ParameterError
from inlay.settings import CHAT
from inlay.wording import clip, printable

if TYPE_CHECKING:
    import asyncio

    from prompt_toolkit import PromptSession

    from inlay.client.async_llm import AsyncLLM

Read = Callable[[], Awaitable[str | None]]


@with_settings(CHAT)
def chat(
    model: Annotated[
        str | None, typer.Argument(help="A directory, a GGUF file, a hub name, random:<shape>, or demo.")
    ] = None,
    document: Annotated[
        list[str] | None, typer.Option("--document", metavar="FILE", help="Begin with this text file; repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system turn in front of the conversation.")] = None,
    *,
    options: Options,
) -> None:
    """Talk to a model about text files. Each file is computed once and then read from the cache.

    Without a terminal, it reads one question or command a line from standard input.
    """
    if model is None:
        raise ParameterError("there is no model; write its name, or inlay chat demo for the one that comes with inlay")
    options.check()
    if is_schema(model):
        raise ParameterError(
            f"{model} is a file that ends in {', '.join(SCHEMA_SUFFIXES)}, so it is a schema; give a model here, and a "
            "schema to inlay run"
        )
    adapters = list(options.adapters(model))
    if len(adapters) > 1:
        raise ParameterError("--adapter is given twice; give the one that answers")
    conversation = DocumentChat(system)
    conversation.add(read_documents(document or ()))
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    announce_hub(model)
    llm = options.load_async(model)
    import asyncio  # here, so that a wrong command fails fast

    if told := plain_text(llm):
        print(f"inlay: {told}", file=sys.stderr)
    shown = printable if sys.stdout.isatty() else str
    session = ChatSession(
        llm,
        options.sampling(llm),
        conversation,
        policy=options.policy,
        adapter=adapters[0] if adapters else None,
        echo=lambda text: _echo(shown(text)),
        say=lambda line: _say(shown(line)),
        note=(lambda line: _say(shown(line))) if terminal else _note,
    )
    try:
        asyncio.run(_converse(session, llm) if terminal else _read_lines(session))
    finally:
        llm.shutdown()  # waits for outstanding writes


async def _converse(session: ChatSession, llm: AsyncLLM) -> None:
    """Answer at a terminal until Ctrl-D or /quit. Mistakes are shown, and the session goes on."""
    import asyncio

    print(f"{clip(llm.model_name)}: ask a question. /help shows the commands, Ctrl-D ends the session.")
    prompt = _prompt()
    running: asyncio.Future[None] | None = None

    def interrupt() -> None:
        if running is not None:
            running.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    while not session.ended:
        try:
            line = await prompt.prompt_async("> ", handle_sigint=False)
        except KeyboardInterrupt:  # the line is given up
            continue
        except EOFError:
            return
        running = asyncio.ensure_future(session.take(line))
        try:
            await running
        except asyncio.CancelledError:
            pass
        except InlayError as error:
            print(f"inlay: {printable(str(error))}", file=sys.stderr, flush=True)
        running = None


async def _read_lines(session: ChatSession) -> None:
    """Answer the lines of standard input. Raises InlayError at the first mistake."""
    while not session.ended:
        try:
            line = sys.stdin.readline()
            while line.endswith("\\\n"):
                line = f"{line[:-2]}\n{sys.stdin.readline()}"
        except UnicodeDecodeError:
            raise ParameterError("<stdin>: is not UTF-8; send questions as UTF-8") from None
        if not line:
            return
        await session.take(line.rstrip("\r\n"))


def _prompt() -> PromptSession[str]:
    """Return the line editor: Enter sends, Esc and Enter or a trailing backslash begin another line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline()
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")  # of keys that were typed before the prompt
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return PromptSession(
        multiline=True,
        key_bindings=keys,
        completer=WordCompleter(list(NAMES), sentence=True),
        complete_while_typing=False,
        prompt_continuation="  ",
    )


def _echo(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    print(line, flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr)
