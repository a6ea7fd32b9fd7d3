"""Documents in the JSON form for several tests, and the problems of the invalid ones."""

from __future__ import annotations

from typing import Any

TRIP = {
    "name": "trip",
    "content": [
        {"role": "system", "content": "You plan trips.\n"},
        {
            "role": "user",
            "content": [
                {
                    "module": "plan",
                    "content": [
                        "Plan a trip of ",
                        {"param": "duration", "len": 5, "default": ""},
                        ".\n",
                        {
                            "union": [
                                {"module": "miami", "content": ["Go to Miami.\n"]},
                                {"module": "tokyo", "content": "Go to Tokyo.\n"},
                            ]
                        },
                    ],
                },
                {"module": "budget"},
            ],
        },
    ],
    "scaffolds": [["plan", "budget"]],
}
TRIP_PML = """\
<schema name="trip">
  <system>
    You plan trips.
  </system>
  <user>
    <module name="plan">
      Plan a trip of <param name="duration" len="5" default=""/>.
      <union>
        <module name="miami">
          Go to Miami.
        </module>
        <module name="tokyo">
          Go to Tokyo.
        </module>
      </union>
    </module>
    <module name="budget"/>
  </user>
  <scaffold modules="plan budget"/>
</schema>
"""
SURF = {
    "schema": "trip",
    "content": [
        {"import": "plan", "arguments": {"duration": "3 days"}, "content": [{"import": "miami"}, "Soon."]},
        "Where can we surf?",
        {"role": "user", "content": ["And ", "then?"]},
    ],
}

SHORT = {
    "schema": "trip",
    "imports": ["budget", {"name": "plan", "arguments": {"duration": "3 days"}, "imports": [{"name": "miami"}]}],
    "text": "Where can we surf?",
}


def inside(*content: Any) -> dict[str, Any]:
    return {"name": "s", "content": list(content)}


def says(*content: Any) -> dict[str, Any]:
    return {"schema": "s", "content": list(content)}


NAME = 'write letters, digits, "_", "-" and ".", with a letter or "_" first'
VALUE = "write a text of at most 1,048,576 characters"
LENGTH = "write a whole number from 1 to 1,000,000"
SCHEMA_PROBLEMS: dict[str, tuple[Any, list[str]]] = {
    "no object": ([1], ['s.json: this is a list of 1; a schema is an object: write {"name": "…", "content": […]}']),
    "a prompt": (
        {"schema": "s"},
        ['s.json: this is a prompt, as it has the key "schema"; read it as a Prompt, or write "name" for a schema'],
    ),
    "no name": (
        {},
        ['s.json: a schema has no "name"; write the name of the schema, a text of 1 to 1,048,576 characters'],
    ),
    "a blank name": (
        {"name": " "},
        ["s.json: name: this is white space alone; write the name of the schema, a text of 1 to 1,048,576 characters"],
    ),
    "an empty name": (
        {"name": ""},
        ['s.json: name: this is the text ""; write the name of the schema, a text of 1 to 1,048,576 characters'],
    ),
    "an unknown key": (
        {"name": "s", "contents": []},
        ['s.json: a schema takes no key "contents"; did you mean "content"?'],
    ),
    "another unknown key": (
        inside({"module": "m", "zzz": 1}),
        ['s.json: content[0].module "m": a module takes no key "zzz"; '
            'it takes "module", "content", "src", "cache", "meta"'],
    ),
    "content of another type": (
        {"name": "s", "content": {"module": "m"}},
        ["s.json: content: this is an object; write a text, or a list of texts and objects"],
    ),
    "members of other types": (
        inside(1.5, None, True, [], [1]),
        [
            "s.json: content[0]: this is the number 1.5; write a text or an object",
            "s.json: content[1]: this is null; write a text or an object",
            "s.json: content[2]: this is true; write a text or an object",
            "s.json: content[3]: this is an empty list; write a text or an object",
            "s.json: content[4]: this is a list of 1; write a text or an object",
        ],
    ),
    "no kind": (
        inside({}, {"modul": "a"}, {"type": "text", "text": "a"}, {"content": "a"}),
        [
            's.json: content[0]: this object does not say what it is; give it one of "module", "union", "role"',
            's.json: content[1]: this object does not say what it is; did you mean "module"?',
            "s.json: content[2]: this object does not say what it is; write a text as a string alone",
            's.json: content[3]: this object does not say what it is; give it one of "module", "union", "role"',
        ],
    ),
    "two kinds": (
        inside({"module": "m", "param": "p"}),
        ['s.json: content[0].module "m": a module takes no key "param"; '
            'it takes "module", "content", "src", "cache", "meta"'],
    ),
    "names": (
        inside({"module": "a b"}, {"module": "user"}, {"module": 5}, {"module": "n" * 257}),
        [
            f's.json: content[0].module "a b".module: "a b" is not a name; {NAME}',
            's.json: content[1].module "user".module: "user" is a tag of PML, which no module is named like; '
            "write another name",
            "s.json: content[2].module: this is the number 5; write a name",
            f's.json: content[3].module "{"n" * 59}…".module: the name "{"n" * 59}…" has 257 characters; '
            "write at most 256",
        ],
    ),
    "a module twice": (
        inside({"module": "m"}, {"union": [{"module": "m"}]}),
        [
            's.json: content[1].union[0].module "m": module "m" is defined twice, first at content[0].module "m"; '
            "give this one another name"
        ],
    ),
    "parameters": (
        inside(
            {
                "module": "m",
                "content": [
                    {"param": "p", "len": 0},
                    {"param": "q", "len": "5", "default": 7},
                    {"param": "r", "len": True},
                    {"param": "s", "len": 5.5},
                    {"param": "t"},
                    {"param": "u", "length": 5},
                    {"param": "v", "len": 10**30},
                    {"param": "w", "len": 5, "default": "x" * 1_048_577},
                ],
            }
        ),
        [
            f's.json: content[0].module "m".content[0].param "p".len: this is the number 0; {LENGTH}',
            f's.json: content[0].module "m".content[1].param "q".len: this is the text "5"; {LENGTH}',
            f's.json: content[0].module "m".content[1].param "q".default: this is the number 7; {VALUE}',
            f's.json: content[0].module "m".content[2].param "r".len: this is true; {LENGTH}',
            f's.json: content[0].module "m".content[3].param "s".len: this is the number 5.5; {LENGTH}',
            f's.json: content[0].module "m".content[4].param "t": a parameter has no "len"; {LENGTH}',
            's.json: content[0].module "m".content[5].param "u": a parameter takes no key "length"; '
            'did you mean "len"?',
            f's.json: content[0].module "m".content[6].param "v".len: this is the number 1e+30; {LENGTH}',
            f's.json: content[0].module "m".content[7].param "w".default: this is a text of 1,048,577 characters; '
            f"{VALUE}",
        ],
    ),
    "a parameter twice": (
        inside({"module": "m", "content": [{"param": "p", "len": 1}, {"param": "p", "len": 2}]}),
        [
            's.json: content[0].module "m".content[1].param "p": parameter "p" is defined twice in module "m"; '
            "give this one another name"
        ],
    ),
    "a parameter outside": (
        inside({"param": "p", "len": 1}),
        ["s.json: content[0]: a parameter stands outside a module; move it into one"],
    ),
    "unions": (
        inside({"union": []}, {"union": "x"}, {"union": ["x", {"union": []}, 5]}),
        [
            "s.json: content[0].union: this is an empty list; write a list of modules, at least one",
            's.json: content[1].union: this is the text "x"; write a list of modules, at least one',
            "s.json: content[2].union[0]: a text stands directly in a union; put it into a module",
            "s.json: content[2].union[1]: a union stands directly in a union; list all members in one union, "
            "or put the inner one into a module",
            "s.json: content[2].union[1].union: this is an empty list; write a list of modules, at least one",
            "s.json: content[2].union[2]: this is the number 5; write a text or an object",
        ],
    ),
    "beside turns": (
        inside(
            {"role": "user"},
            " ",
            {"role": "user", "content": [{"module": "m", "content": [{"role": "user"}]}]},
            {"import": "m"},
        ),
        [
            's.json: content[2].user.content[0].module "m".content[0]: a turn stands in another turn or in a union; '
            "turns stand at the top level of a schema, or in a module",
            "s.json: content[3]: an import stands in a schema, but only prompts import; "
            'write {"module": …} to define a module',
        ],
    ),
    "roles": (
        inside({"role": "tool"}, {"role": ["user"], "content": 5}),
        [
            's.json: content[0].role: this is the text "tool"; write "system" or "user" or "assistant"',
            's.json: content[1].role: this is a list of 1; write "system" or "user" or "assistant"',
            "s.json: content[1].content: this is the number 5; write a text, or a list of texts and objects",
        ],
    ),
    "scaffolds": (
        {
            **inside({"module": "miami"}, {"union": [{"module": "b"}, {"module": "c"}]}),
            "scaffolds": ["miami b", [], ["miami"], ["miami", "maimi"], ["b", "c"], ["b", 1]],
        },
        [
            's.json: scaffolds[0]: this is the text "miami b"; write a list of at least two modules\' names',
            "s.json: scaffolds[1]: this is an empty list; write a list of at least two modules' names",
            "s.json: scaffolds[5]: this is a list of 2; write a list of at least two modules' names",
            's.json: scaffolds[2]: the scaffold names "miami" alone; name at least two modules, or delete it',
            's.json: scaffolds[3]: the scaffold names "maimi", which is no module of this schema; '
            'did you mean "miami"?',
            's.json: scaffolds[4]: the scaffold names "b" and "c", of which a union allows one; '
            "leave one of them out",
        ],
    ),
    "scaffolds of another type": (
        {"name": "s", "scaffolds": "ab"},
        ["s.json: scaffolds: this is the text \"ab\"; write a list of lists of modules' names"],
    ),
    "src": (
        inside({"module": "m", "src": "a", "content": "b"}, {"module": "n", "src": "a"}, {"module": "o", "src": 1}),
        [
            's.json: content[0].module "m".src: the module has both src and content; leave one of them out',
            's.json: content[1].module "n".src: src needs a folder, and a schema in a string has none; '
            "give one with Schema.from_json(text, folder=…)",
            's.json: content[2].module "o".src: this is the number 1; write a text, the name of a file '
            "beside the schema",
        ],
    ),
}  # fmt: skip
PROMPT_PROBLEMS: dict[str, tuple[Any, list[str]]] = {
    "no object": ("x", ['p.json: this is the text "x"; a prompt is an object: write {"schema": "…", "content": […]}']),
    "a schema": (
        {"name": "s"},
        [
            'p.json: this is a schema, as it has the key "name"; read it as a Schema, or write "schema" '
            "with the name of the prompt's schema"
        ],
    ),
    "both": (
        {"name": "s", "schema": "s"},
        ['p.json: a prompt takes no key "name"; it takes "schema", "content", "imports", "text"'],
    ),
    "imports": (
        says({"import": "a b"}, {"import": "user"}, {"import": None}, {"imports": "a"}),
        [
            f'p.json: content[0].import "a b".import: "a b" is not a name; {NAME}',
            'p.json: content[1].import "user".import: "user" is a tag of PML, which no module is named like; '
            "write another name",
            "p.json: content[2].import: this is null; write a name",
            'p.json: content[3]: this object does not say what it is; did you mean "import"?',
        ],
    ),
    "arguments": (
        says({"import": "a", "arguments": {"x": 3, "a b": "1"}}, {"import": "b", "arguments": ["x"]}),
        [
            f'p.json: content[0].import "a".arguments "x": this is the number 3; {VALUE}',
            f'p.json: content[0].import "a".arguments "a b": "a b" is not a name; {NAME}',
            'p.json: content[1].import "b".arguments: this is a list of 1; '
            "write an object with a text for each parameter",
        ],
    ),
    "what stands in schemas": (
        says({"module": "a"}, {"param": "p", "len": 1}, {"union": []}, {"import": "a", "content": [{"role": "user"}]}),
        [
            "p.json: content[0]: a module is defined in a prompt, but only schemas define; "
            'write {"import": …} to import one',
            "p.json: content[1]: a parameter stands in a prompt, but only schemas have them; "
            "write what the prompt imports",
            "p.json: content[2]: a union stands in a prompt, but only schemas have them; write what the prompt imports",
            'p.json: content[3].import "a".content[0]: a turn stands inside something else; '
            "turns stand at the top level of a prompt",
        ],
    ),
}
PROBLEMS = SCHEMA_PROBLEMS | PROMPT_PROBLEMS
