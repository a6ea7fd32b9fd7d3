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


def prompt_of(*content: Any) -> dict[str, Any]:
    return {"schema": "s", "content": list(content)}


#: Documents with the code and the place of each problem.
SCHEMA_PROBLEMS: dict[str, tuple[Any, list[str]]] = {
    "no object": ([1], ["pml.wrong_type"]),
    "a prompt": (
        {"schema": "s"},
        ["pml.wrong_document"],
    ),
    "no name": (
        {},
        ["pml.missing_key"],
    ),
    "a blank name": (
        {"name": " "},
        ["pml.empty_attribute name"],
    ),
    "an empty name": (
        {"name": ""},
        ["pml.wrong_type name"],
    ),
    "an unknown key": (
        {"name": "s", "contents": []},
        ["pml.unknown_key"],
    ),
    "another unknown key": (
        inside({"module": "m", "zzz": 1}),
        ['pml.unknown_key content[0].module "m"'],
    ),
    "content of another type": (
        {"name": "s", "content": {"module": "m"}},
        ["pml.wrong_type content"],
    ),
    "members of other types": (
        inside(1.5, None, True, [], [1]),
        [
            "pml.wrong_type content[0]",
            "pml.wrong_type content[1]",
            "pml.wrong_type content[2]",
            "pml.wrong_type content[3]",
            "pml.wrong_type content[4]",
        ],
    ),
    "no kind": (
        inside({}, {"modul": "a"}, {"type": "text", "text": "a"}, {"content": "a"}),
        [
            "pml.unknown_object content[0]",
            "pml.unknown_object content[1]",
            "pml.unknown_object content[2]",
            "pml.unknown_object content[3]",
        ],
    ),
    "two kinds": (
        inside({"module": "m", "param": "p"}),
        ['pml.unknown_key content[0].module "m"'],
    ),
    "names": (
        inside({"module": "a b"}, {"module": "user"}, {"module": 5}, {"module": "n" * 257}),
        [
            'pml.invalid_name content[0].module "a b".module',
            'pml.invalid_name content[1].module "user".module',
            "pml.wrong_type content[2].module",
            'pml.invalid_name content[3].module "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn…".module',
        ],
    ),
    "rules of turns": (
        inside({"role": "user", "content": [{"module": "m", "content": [{"role": "user"}]}, {"param": "p", "len": 1}]}),
        [
            'pml.misplaced_object content[0].user.content[0].module "m".content[0]',
            "pml.misplaced_object content[0].user.content[1]",
        ],
    ),
    "rules of scaffolds": (
        {
            **inside({"module": "miami"}, {"union": [{"module": "b"}, {"module": "c"}]}),
            "scaffolds": [["miami"], ["miami", "maimi"], ["b", "c"]],
        },
        [
            "pml.invalid_scaffold scaffolds[0]",
            "pml.unknown_module scaffolds[1]",
            "pml.invalid_scaffold scaffolds[2]",
        ],
    ),
    "rules of src": (
        inside(
            {"module": "m", "src": "a", "content": "b"},
            {"module": "n", "src": "a"},
            {"module": "o", "src": "a", "content": [" "]},
        ),
        [
            'pml.src_and_content content[0].module "m".src',
            'pml.src_without_folder content[1].module "n".src',
            'pml.src_and_content content[2].module "o".src',
        ],
    ),
    "a module twice": (
        inside({"module": "m"}, {"union": [{"module": "m"}]}),
        ['pml.duplicate_name content[1].union[0].module "m".module'],
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
            'pml.wrong_type content[0].module "m".content[0].param "p".len',
            'pml.wrong_type content[0].module "m".content[1].param "q".len',
            'pml.wrong_type content[0].module "m".content[1].param "q".default',
            'pml.wrong_type content[0].module "m".content[2].param "r".len',
            'pml.wrong_type content[0].module "m".content[3].param "s".len',
            'pml.missing_key content[0].module "m".content[4].param "t"',
            'pml.unknown_key content[0].module "m".content[5].param "u"',
            'pml.wrong_type content[0].module "m".content[6].param "v".len',
            'pml.wrong_type content[0].module "m".content[7].param "w".default',
        ],
    ),
    "a parameter twice": (
        inside({"module": "m", "content": [{"param": "p", "len": 1}, {"param": "p", "len": 2}]}),
        ['pml.duplicate_name content[0].module "m".content[1].param "p"'],
    ),
    "a parameter outside": (
        inside({"param": "p", "len": 1}),
        ["pml.misplaced_object content[0]"],
    ),
    "unions": (
        inside({"union": []}, {"union": "x"}, {"union": ["x", {"union": []}, 5]}),
        [
            "pml.wrong_type content[0].union",
            "pml.wrong_type content[1].union",
            "pml.misplaced_text content[2].union[0]",
            "pml.misplaced_object content[2].union[1]",
            "pml.wrong_type content[2].union[2]",
        ],
    ),
    "beside turns": (
        inside(
            {"role": "user"},
            " ",
            {"role": "user", "content": [{"module": "m", "content": [{"role": "user"}]}]},
            {"import": "m"},
        ),
        ["pml.misplaced_object content[3]"],
    ),
    "roles": (
        inside({"role": "tool"}, {"role": ["user"], "content": 5}),
        [
            "pml.wrong_type content[0].role",
            "pml.wrong_type content[1].role",
            "pml.wrong_type content[1].content",
        ],
    ),
    "scaffolds": (
        {
            **inside({"module": "miami"}, {"union": [{"module": "b"}, {"module": "c"}]}),
            "scaffolds": ["miami b", [], ["miami"], ["miami", "maimi"], ["b", "c"], ["b", 1]],
        },
        [
            "pml.wrong_type scaffolds[0]",
            "pml.wrong_type scaffolds[1]",
            "pml.wrong_type scaffolds[5][1]",
        ],
    ),
    "scaffolds of another type": (
        {"name": "s", "scaffolds": "ab"},
        ["pml.wrong_type scaffolds"],
    ),
    "src": (
        inside({"module": "m", "src": "a", "content": "b"}, {"module": "n", "src": "a"}, {"module": "o", "src": 1}),
        ['pml.wrong_type content[2].module "o".src'],
    ),
}  # fmt: skip
PROMPT_PROBLEMS: dict[str, tuple[Any, list[str]]] = {
    "no object": ("x", ["pml.wrong_type"]),
    "a schema": (
        {"name": "s"},
        ["pml.wrong_document"],
    ),
    "both": (
        {"name": "s", "schema": "s"},
        ["pml.unknown_key"],
    ),
    "imports": (
        prompt_of({"import": "a b"}, {"import": "user"}, {"import": None}, {"imports": "a"}),
        [
            'pml.invalid_name content[0].import "a b".import',
            'pml.invalid_name content[1].import "user".import',
            "pml.wrong_type content[2].import",
            "pml.unknown_object content[3]",
        ],
    ),
    "arguments": (
        prompt_of({"import": "a", "arguments": {"x": 3, "a b": "1"}}, {"import": "b", "arguments": ["x"]}),
        [
            'pml.wrong_type content[0].import "a".arguments "x"',
            'pml.invalid_name content[0].import "a".arguments "a b"',
            'pml.wrong_type content[1].import "b".arguments',
        ],
    ),
    "what stands in schemas": (
        prompt_of(
            {"module": "a"}, {"param": "p", "len": 1}, {"union": []}, {"import": "a", "content": [{"role": "user"}]}
        ),
        [
            "pml.misplaced_object content[0]",
            "pml.misplaced_object content[1]",
            "pml.misplaced_object content[2]",
            'pml.misplaced_object content[3].import "a".content[0]',
        ],
    ),
}
PROBLEMS = SCHEMA_PROBLEMS | PROMPT_PROBLEMS
