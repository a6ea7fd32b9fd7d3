// What all views share: HTML in templates, polling, numbers, and small components.

import { h } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);

/** The tokens of a prompt by their source, in the order of the bars. */
export const SOURCES = [
  ["exact_tokens", "exact", "Cached, and equal to full prefill"],
  ["module_tokens", "module", "Cached, and encoded in another context"],
  ["computed_tokens", "computed", "Computed for this request"],
];
export const TIERS = { pool: "Pool", host: "Host memory", disk: "Disk", shared: "Shared store" };

const digits = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const count = (value) => (value == null ? "–" : digits.format(value));
export const compact = (value) => (value == null ? "–" : short.format(value));
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value >= 100 || !unit ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** A duration, from microseconds to days. */
export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  return value < 172800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} d`;
}

/** Ask again every `every` ms while the page is visible. A refusal for lack of rate makes it wait as told. */
export function usePolling(ask, every, inputs = []) {
  const [state, setState] = useState({ data: null, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    let timer;
    const wake = () => document.hidden || run();
    async function run() {
      clearTimeout(timer);
      let wait = every;
      try {
        const data = await ask(abort.signal);
        if (!abort.signal.aborted) setState({ data, error: null });
      } catch (error) {
        if (abort.signal.aborted) return;
        wait = error.retry ? 1000 * error.retry : 2 * every;
        setState((before) => ({ ...before, error }));
      }
      if (every && !document.hidden && !abort.signal.aborted) timer = setTimeout(run, wait);
    }
    run();
    document.addEventListener("visibilitychange", wake);
    addEventListener("inlay:changed", run);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", wake);
      removeEventListener("inlay:changed", run);
    };
  }, [...inputs, every, turn]);
  const refresh = useCallback(() => setTurn((before) => before + 1), []);
  return { ...state, refresh };
}

/** A button that runs something once at a time, and shows its error as the tooltip of a mark. */
export function Action({ run, children, kind = "", ...others }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  async function click() {
    setBusy(true);
    setError(null);
    try {
      await run();
    } catch (caught) {
      setError(caught);
    } finally {
      setBusy(false);
    }
  }
  return html`<button type="button" class=${`button ${kind}`} disabled=${busy} onClick=${click} ...${others}>
      ${children}
    </button>
    ${error && html`<${Problem} error=${error} />`}`;
}

/** An error of a request. */
export const Problem = ({ error }) =>
  html`<p class="problem" role="alert">
    ${error.message} ${error.code && html`<code>${error.code}</code>`}
  </p>`;

export const Empty = ({ title, children }) =>
  html`<div class="empty"><${Mosaic} /><h2>${title}</h2><p>${children}</p></div>`;

export const Mosaic = () =>
  html`<svg class="mosaic" viewBox="0 0 32 32" aria-hidden="true">
    <path d="M3 3h12v12H3z" /><path d="M17 3h12v7H17z" /><path d="M17 12h12v17H17z" /><path d="M3 17h12v12H3z" />
  </svg>`;

/** The tokens of a prompt as one bar, with numbers below it. `plain` leaves the numbers out. */
export function Split({ usage, plain = false }) {
  const total = SOURCES.reduce((sum, [field]) => sum + (usage[field] ?? 0), 0);
  const shown = SOURCES.filter(([field]) => usage[field]);
  const label = shown.map(([field, name]) => `${count(usage[field])} ${name}`).join(", ");
  return html`<div class="split">
    <div class="bar" role="img" aria-label=${`Prompt tokens: ${label}`}>
      ${shown.map(
        ([field, name, says]) =>
          html`<span class=${name} title=${`${says}: ${count(usage[field])}`} style=${{ flexGrow: usage[field] / total }} />`,
      )}
    </div>
    ${!plain &&
    html`<ul class="legend">
      ${shown.map(
        ([field, name, says]) => html`<li title=${says}><i class=${name}></i><b>${count(usage[field])}</b> ${name}</li>`,
      )}
      ${usage.recomputed_tokens
        ? html`<li title="Module tokens of selective recomputation">
            <i class="recomputed"></i><b>${count(usage.recomputed_tokens)}</b> recomputed
          </li>`
        : null}
    </ul>`}
  </div>`;
}

const PHASES = [
  ["queue", "Waiting"],
  ["load", "Finding and placing stored KV"],
  ["prefill", "Prefill"],
  ["decode", "Decode"],
];

/** The phases of a request in seconds. An unknown phase has 0. */
export function phases(timing) {
  const { queue_s: queue, fetch_s: load, compute_s: prefill, ttft_s: first, total_s: total } = timing;
  return { queue: queue ?? 0, load: load ?? 0, prefill: prefill ?? 0, decode: first != null && total != null ? total - first : 0 };
}

/** The time of a request as one bar of its phases. */
export function Phases({ timing, longest }) {
  const found = phases(timing);
  const total = Object.values(found).reduce((sum, value) => sum + value, 0);
  const label = PHASES.map(([name, says]) => `${says} ${seconds(found[name])}`).join(", ");
  return html`<div class="phases" role="img" aria-label=${label} title=${label}>
    <div class="bar" style=${{ width: `${longest ? Math.max(2, (100 * total) / longest) : 100}%` }}>
      ${PHASES.map(([name]) => found[name] > 0 && html`<span class=${name} style=${{ flexGrow: found[name] / total }} />`)}
    </div>
  </div>`;
}

/** Move focus among the items of a list with the arrow keys. */
export function useArrows(selector) {
  const list = useRef(null);
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || event.altKey) return;
    const items = [...list.current.querySelectorAll(selector)];
    const at = items.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    items[(at + step + items.length) % items.length].focus();
  };
  return { ref: list, onKeyDown };
}

/** A text, cut where it is long. */
export const clip = (text, most = 60) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
