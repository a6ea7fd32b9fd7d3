// The sources of a question: documents as chips, or a schema with its choices and arguments.

import { useEffect, useRef, useState } from "preact/hooks";
import { all, call, get } from "./api.mjs";
import { count, html, Problem, usePolling } from "./parts.mjs";

const MOST_BYTES = 2 ** 22;
const MOST_CHARACTERS = 1_000_000; // that /tokenize counts
const EXAMPLES = [
  ["bravel.txt", "Bravel is a town. It was founded in 1687. The mayor of Bravel is Rosa Tilen. Bravel has a population of 4,820 people.\n"],
  ["rosa.txt", "This is the record of Rosa Tilen. Rosa Tilen was born in 1961. She lives in Bravel. Rosa Tilen works as a lawyer.\n"],
  ["star.txt", "Star of Gamin is a ship. The captain of Star of Gamin is Rolan Fader. It carries coal. Star of Gamin was built in 1903.\n"],
];

let numbers = 0;

/** A document with its tokens, which the server counts. */
async function read(name, text) {
  const made = { id: (numbers += 1), name, text, on: true, tokens: null };
  if (text.length <= MOST_CHARACTERS) {
    const counted = await call("POST", "tokenize", { prompt: text, add_special_tokens: false }).catch(() => null);
    made.tokens = counted?.count ?? null;
  }
  return made;
}

async function readFile(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has more than 4 MiB. Cut it into parts.`);
  const text = await file.text();
  if (text.includes("\0") || text.includes("\uFFFD")) throw new Error(`${file.name} is no UTF-8 text. Convert it first.`);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return read(file.name, text.endsWith("\n") ? text : `${text}\n`);
}

const moved = (list, from, to) => {
  const found = [...list];
  found.splice(to, 0, ...found.splice(from, 1));
  return found;
};

export function Documents({ documents, change }) {
  const [error, setError] = useState(null);
  const [pastes, setPastes] = useState(false);
  const [over, setOver] = useState(false);
  const [told, setTold] = useState("");
  const dragged = useRef(null);
  const list = useRef(null);
  const picker = useRef(null);
  async function add(files) {
    setError(null);
    const read = await Promise.allSettled([...files].map(readFile));
    change((before) => [...before, ...read.filter((one) => one.value).map((one) => one.value)]);
    const failed = read.find((one) => one.reason);
    if (failed) setError(failed.reason);
  }
  async function example() {
    const made = await Promise.all(EXAMPLES.map(([name, text]) => read(name, text)));
    change((before) => [...before, ...made]);
  }
  function move(from, to) {
    if (to < 0 || to >= documents.length) return;
    const { id, name } = documents[from];
    change((before) => moved(before, from, to));
    setTold(`${name} is number ${to + 1} of ${documents.length}`);
    setTimeout(() => list.current?.querySelector(`[data-id="${id}"]`)?.focus());
  }
  function drop(at) {
    setTold(`${documents[at].name} is dropped`);
    change((before) => before.filter((_, number) => number !== at));
  }
  function keys(event, at) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step && event.altKey) {
      event.preventDefault();
      move(at, at + step);
    } else if (step && event.target.matches(".chip")) {
      event.preventDefault();
      list.current.querySelectorAll(".chip")[at + step]?.focus();
    } else if ((event.key === "Delete" || event.key === "Backspace") && event.target.matches(".chip")) {
      event.preventDefault();
      drop(at);
    }
  }
  function hover(event, at) {
    event.preventDefault();
    const from = documents.findIndex((one) => one.id === dragged.current);
    if (from >= 0 && from !== at) change((before) => moved(before, from, at));
  }
  return html`<div
    class=${`documents ${over ? "over" : ""}`}
    onDragOver=${(event) => {
      event.preventDefault();
      setOver(event.dataTransfer.types.includes("Files"));
    }}
    onDragLeave=${() => setOver(false)}
    onDrop=${(event) => {
      event.preventDefault();
      setOver(false);
      if (event.dataTransfer.files.length) add(event.dataTransfer.files);
    }}
  >
    <ol class="chips" ref=${list} aria-label="Documents, in the order of the prompt">
      ${documents.map(
        (one, at) => html`<li
          class=${`chip ${one.on ? "" : "off"}`}
          key=${one.id}
          data-id=${one.id}
          tabindex="0"
          draggable="true"
          onKeyDown=${(event) => keys(event, at)}
          onDragStart=${() => (dragged.current = one.id)}
          onDragOver=${(event) => hover(event, at)}
          onDragEnd=${() => (dragged.current = null)}
        >
          <span class="grip" aria-hidden="true">⠿</span>
          <label>
            <input
              type="checkbox"
              checked=${one.on}
              onChange=${() => change((before) => before.map((other) => (other === one ? { ...one, on: !one.on } : other)))}
            />
            <span class="name">${one.name}</span>
          </label>
          <small>${one.tokens == null ? `${count(one.text.length)} chars` : `${count(one.tokens)} tok`}</small>
          <span class="tools">
            <button type="button" aria-label=${`Move ${one.name} up`} disabled=${at === 0} onClick=${() => move(at, at - 1)}>↑</button>
            <button type="button" aria-label=${`Move ${one.name} down`} disabled=${at === documents.length - 1} onClick=${() => move(at, at + 1)}>↓</button>
            <button type="button" aria-label=${`Drop ${one.name}`} onClick=${() => drop(at)}>✕</button>
          </span>
        </li>`,
      )}
    </ol>
    <p class="hidden" aria-live="polite">${told}</p>
    ${!documents.length && html`<p class="note">Each document is encoded once. Later questions read it from the cache, in any order.</p>`}
    ${error && html`<${Problem} error=${error} />`}
    ${pastes &&
    html`<${Paste}
      close=${() => setPastes(false)}
      add=${async (name, text) => {
        const made = await read(name, text);
        change((before) => [...before, made]);
      }}
    />`}
    <div class="row">
      <input type="file" multiple hidden ref=${picker} onChange=${(event) => add(event.target.files).then(() => (picker.current.value = ""))} />
      <button type="button" class="button" onClick=${() => picker.current.click()}>Add files</button>
      <button type="button" class="button" aria-expanded=${pastes} onClick=${() => setPastes(!pastes)}>Paste text</button>
      ${!documents.length && html`<button type="button" class="button quiet" onClick=${example}>Examples</button>`}
    </div>
  </div>`;
}

function Paste({ add, close }) {
  async function save(event) {
    event.preventDefault();
    const given = new FormData(event.target);
    const text = given.get("text");
    if (!text.trim()) return;
    await add(given.get("name").trim() || "pasted text", text.endsWith("\n") ? text : `${text}\n`);
    close();
  }
  return html`<form class="paste" onSubmit=${save}>
    <label>Name<input name="name" placeholder="pasted text" maxlength="80" /></label>
    <label>Text<textarea name="text" rows="5" autofocus></textarea></label>
    <div class="row end"><button type="button" class="button quiet" onClick=${close}>Cancel</button><button class="button main">Add</button></div>
  </form>`;
}

export function SchemaChoice({ choice, change, shown }) {
  const list = usePolling((signal) => all("v1/schemas?limit=100", (last) => `&after=${encodeURIComponent(last.name)}`, 400, signal), shown ? 10000 : 0, [shown]);
  const names = list.data?.rows.map((row) => row.name) ?? [];
  const name = choice.schema?.name ?? names[0];
  const [error, setError] = useState(null);
  async function load(wanted) {
    try {
      const schema = await get(`v1/schemas/${encodeURIComponent(wanted)}`);
      change({ schema, chosen: first(schema.modules), given: {} });
    } catch (caught) {
      setError(caught);
    }
  }
  useEffect(() => {
    if (!choice.schema && names.length) load(names[0]);
  }, [names.length]);
  if (list.error || error) return html`<${Problem} error=${list.error ?? error} />`;
  if (list.data && !names.length) return html`<p class="note">This server has no schemas. Start it with <code>--schema FILE</code>.</p>`;
  return html`<label>Schema
      <select value=${name} onChange=${(event) => load(event.target.value)}>
        ${names.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>
    </label>
    ${choice.schema && html`<fieldset class="choices"><legend>Modules</legend><${Nodes} nodes=${choice.schema.modules} choice=${choice} change=${change} /></fieldset>`}`;
}

/** The first member of each union, so that a first question has something to read. */
function first(nodes) {
  const node = nodes.find((one) => !one.union) ?? nodes[0]?.union?.[0];
  return new Set(node ? [node.module] : []);
}

function Nodes({ nodes, choice, change }) {
  const { chosen, given } = choice;
  const choose = (path, others = []) => {
    const next = new Set(chosen);
    for (const other of others) if (other !== path) next.delete(other);
    if (next.has(path)) next.delete(path);
    else next.add(path);
    change({ ...choice, chosen: next });
  };
  const one = (node, members) => html`<li key=${node.module}>
    <label class="pick">
      <input type="checkbox" class=${members ? "one" : ""} checked=${chosen.has(node.module)} onChange=${() => choose(node.module, members)} />
      <span>${node.module.split("/").at(-1)}</span><small>${count(node.tokens)} tok</small>
    </label>
    ${chosen.has(node.module) &&
    node.params.map(
      (param) => html`<label class="argument">${param.param}
        <input
          placeholder=${param.default ?? `up to ${param.len} tokens`}
          value=${given[`${node.module} ${param.param}`] ?? ""}
          onInput=${(event) => change({ ...choice, given: { ...given, [`${node.module} ${param.param}`]: event.target.value } })}
        />
      </label>`,
    )}
    ${chosen.has(node.module) && node.modules.length > 0 && html`<${Nodes} nodes=${node.modules} choice=${choice} change=${change} />`}
  </li>`;
  return html`<ul>
    ${nodes.map((node) =>
      node.union
        ? html`<li class="union"><small>one of</small><ul>${node.union.map((member) => one(member, node.union.map((other) => other.module)))}</ul></li>`
        : one(node),
    )}
  </ul>`;
}
