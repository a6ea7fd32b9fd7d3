"""An agent's tools: each description is a module, and each task imports the tools that it may use."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Annotated, Literal

from inlay import LLM, Length, SamplingParams, program, system, user

TOOLS = {
    "search": """\
search(query: string, results: integer = 5)
  Searches the web. Returns titles, addresses and first lines. Use it for facts that may have changed, and name the
  address of what you use. Do not search for what is in the conversation already.
""",
    "calendar": """\
calendar(action: "list" | "add" | "move" | "delete", from: date, to: date, title: string = "")
  Reads and changes the user's calendar. Ask before you delete or move an entry that has other guests. Times are in the
  user's time zone; an entry without an end lasts one hour.
""",
    "mail": """\
mail(to: string[], subject: string, body: string, send: boolean = false)
  Writes a mail. With send = false it becomes a draft, which is what the user wants unless they say "send". Never add
  recipients that the user has not named.
""",
    "shell": """\
shell(command: string, seconds: integer = 30)
  Runs a command in the project's folder and returns its output and exit status. Read before you write; never delete
  what you did not make.
""",
}


@program
def agent(
    tools: frozenset[Literal["search", "calendar", "mail", "shell"]],
    today: Annotated[str, Length(16)],
) -> Iterator[str]:
    """An agent's system prompt, with the tools that it may use."""
    with system():
        yield "You are an agent.\n"
        yield "Think about which tool brings you nearer to the goal, call it, and look at the result.\n"
        yield "A call is a line of JSON: the name of the tool, and its arguments. These are your tools:\n"
        for name, description in TOOLS.items():
            if name in tools:
                yield description
        if not tools:
            yield "You have no tools. Answer from what you know, and say when you do not.\n"
    with user():
        yield f"Today is {today}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--reuse", default="anchored")
    parser.add_argument("--today", default="2 March 2026")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, reuse=arguments.reuse)
    llm.add_schema(agent.schema)
    tasks = {
        "Find a train to Bravel on Friday, and put it into my calendar.": {"search", "calendar"},
        "Which files did I change yesterday? Write Dora a mail about them.": {"mail", "shell"},
        "Tell me a joke.": set(),
    }
    prompts = [agent(frozenset(tools), arguments.today).builder().text(task).build() for task, tools in tasks.items()]
    for task, answer in zip(tasks, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True):
        usage = answer.usage
        print(f"{task} ({', '.join(sorted(tasks[task])) or 'no tools'})")
        print(f"  {usage.cached_tokens} tokens cached, {usage.computed_tokens} computed")
        print(f"  {answer.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
