// The playground: questions about documents or a schema, with the source of every prompt token.

import { useEffect, useRef, useState } from "preact/hooks";
import { Turn } from "./answer.mjs";
import { ask, fields, messages, schemaPrompt, withoutReuse } from "./ask.mjs";
import { Empty, html } from "./parts.mjs";
import { Documents, SchemaChoice } from "./sources.mjs";

const POLICIES = ["", "off", "exact", "isolated", "anchored", "modular", "auto"];
const RECOMPUTE = ["", "linked:3", "profiled:0.15"];
const EMPTY = { schema: null, chosen: new Set(), given: {} };

export function Playground({ models, shown }) {
  const [mode, setMode] = useState("documents");
  const [documents, setDocuments] = useState([]);
  const [choice, setChoice] = useState(EMPTY);
  const [turns, setTurns] = useState([]);
  const [settings, setSettings] = useState({ system: "Answer from the documents.", reuse: "", recompute: "", length: 256, temperature: 0, model: "", compares: false });
  const running = turns.find((turn) => turn.running);
  const abort = useRef(null);
  const end = useRef(null);
  const set = (name) => (event) => {
    const { type, checked, value } = event.target;
    setSettings((before) => ({ ...before, [name]: type === "checkbox" ? checked : type === "number" ? Number(value) : value }));
  };

  async function send(question) {
    const used = documents.filter((one) => one.on);
    const schema = mode === "schema";
    const earlier = schema ? [] : turns.filter((turn) => turn.mode === "documents" && turn.reused?.total_s != null);
    const prompt = schema
      ? { prompt: schemaPrompt(choice.schema, choice.chosen, choice.given, question) }
      : { messages: messages(settings.system, used, earlier, question) };
    const body = { ...prompt, ...fields(settings, settings.compares) };
    const id = Date.now();
    const change = (part) => setTurns((before) => before.map((turn) => (turn.id === id ? { ...turn, ...part } : turn)));
    const name = schema ? (path) => path : named(used, settings.system);
    setTurns((before) => [...before, { id, mode, question, name, compares: settings.compares, running: "reused", reused: null, full: null, error: null }]);
    abort.current = new AbortController();
    const { signal } = abort.current;
    try {
      await ask(body, (reused) => change({ reused }), signal);
      if (settings.compares) {
        change({ running: "full" });
        await ask(withoutReuse(body), (full) => change({ full }), signal);
      }
    } catch (error) {
      change({ error: error.name === "AbortError" ? new Error("Stopped.") : error });
    } finally {
      change({ running: null });
    }
  }

  useEffect(() => end.current?.scrollIntoView({ block: "end", behavior: "smooth" }), [turns.length, running?.running]);

  return html`
    <aside class="card sources" aria-label="Sources and settings">
      <div class="choice wide" role="group" aria-label="Source">
        <button type="button" aria-pressed=${mode === "documents"} onClick=${() => setMode("documents")}>Documents</button>
        <button type="button" aria-pressed=${mode === "schema"} onClick=${() => setMode("schema")}>Schema</button>
      </div>
      ${mode === "documents"
        ? html`<${Documents} documents=${documents} change=${setDocuments} />`
        : html`<${SchemaChoice} choice=${choice} change=${setChoice} shown=${shown} />`}
      <label class="switch"><input type="checkbox" role="switch" checked=${settings.compares} onChange=${set("compares")} />Compare with full prefill</label>
      <details class="settings">
        <summary>Settings</summary>
        ${models.length > 1 &&
        html`<label>Model<select value=${settings.model} onChange=${set("model")}>
          ${models.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}${one.parent ? ` (adapter)` : ""}</option>`)}
        </select></label>`}
        ${mode === "documents" && html`<label>System text<textarea rows="2" value=${settings.system} onInput=${set("system")}></textarea></label>`}
        <label>Reuse<select value=${settings.reuse} onChange=${set("reuse")}>
          ${POLICIES.map((one) => html`<option value=${one}>${one || "server default"}</option>`)}
        </select></label>
        <label>Recompute<select value=${settings.recompute} onChange=${set("recompute")}>
          ${RECOMPUTE.map((one) => html`<option value=${one}>${one || "none"}</option>`)}
        </select></label>
        <div class="row">
          <label>Most tokens<input type="number" min="1" max="100000" value=${settings.length} onChange=${set("length")} /></label>
          <label>Temperature<input type="number" min="0" max="2" step="0.1" value=${settings.temperature} onChange=${set("temperature")} /></label>
        </div>
      </details>
    </aside>
    <div class="conversation">
      <div class="turns" role="log" aria-label="Conversation">
        ${!turns.length &&
        html`<${Empty} title="Ask about your documents">
          Each document is encoded once and read at any place of later prompts. Reorder or drop one, ask again, and see which tokens were computed.
        <//>`}
        ${turns.map((turn) => html`<${Turn} key=${turn.id} turn=${turn} />`)}
        <div class="end" ref=${end}></div>
      </div>
      <${Composer}
        running=${Boolean(running)}
        disabled=${mode === "schema" && !choice.schema}
        send=${send}
        stop=${() => abort.current?.abort()}
        clear=${turns.length && !running ? () => setTurns([]) : null}
      />
    </div>
  `;
}

/** Names of parts of messages: those of the documents. */
function named(documents, system) {
  const at = `messages[${system ? 1 : 0}].content[`;
  return (path) => (path.startsWith(at) ? (documents[Number.parseInt(path.slice(at.length), 10)]?.name ?? "question") : path);
}

function Composer({ running, disabled, send, stop, clear }) {
  const [text, setText] = useState("");
  const field = useRef(null);
  function submit(event) {
    event.preventDefault();
    if (running || disabled || !text.trim()) return;
    send(text.trim());
    setText("");
    field.current.focus();
  }
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <textarea
      id="question"
      ref=${field}
      rows="1"
      placeholder="Ask a question"
      aria-label="Question"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${keys}
    ></textarea>
    ${clear && html`<button type="button" class="button quiet" onClick=${clear}>Clear</button>`}
    ${running
      ? html`<button type="button" class="button" onClick=${stop}>Stop</button>`
      : html`<button class="button main" disabled=${disabled || !text.trim()}>Ask</button>`}
  </form>`;
}
