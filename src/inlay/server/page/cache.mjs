// The cache as a map of tiles: one for each stored segment, larger for more tokens.

import { useMemo, useState } from "preact/hooks";
import { all, call, get } from "./api.mjs";
import { Action, bytes, clip, compact, count, Empty, html, percent, Problem, seconds, TIERS, useArrows, usePolling } from "./parts.mjs";

const MOST = 2000;
const MANY = 500; // segments, from which on the map asks less often
const ORDERS = {
  group: ["Schema", (a, b) => title(a).localeCompare(title(b))],
  tokens: ["Tokens", (a, b) => b.tokens - a.tokens],
  uses: ["Hits", (a, b) => (b.uses ?? 0) - (a.uses ?? 0)],
  idle: ["Recent", (a, b) => (a.idle_s ?? Infinity) - (b.idle_s ?? Infinity)],
};

const title = (row) => (row.schema == null ? `part ${row.key.slice(0, 6)}` : row.module || "always");
const group = (row) => row.schema ?? "Messages";
const form = (row) => (row.context_tokens ? `behind ${count(row.context_tokens)} tokens` : "isolated");

/** Rows by group, in the order of their first rows. The method of Map for this would need Chrome 117. */
function grouped(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!groups.has(group(row))) groups.set(group(row), []);
    groups.get(group(row)).push(row);
  }
  return groups;
}

/** Columns and rows of a tile in the grid. */
const spans = (tokens) => (tokens < 48 ? "s" : tokens < 192 ? "m" : tokens < 768 ? "l" : "xl");

export function Cache() {
  const [order, setOrder] = useState("group");
  const [filter, setFilter] = useState("");
  const [chosen, setChosen] = useState(null);
  const totals = usePolling((signal) => get("v1/cache", signal), 3000);
  const [many, setMany] = useState(false);
  const segments = usePolling(
    async (signal) => {
      const found = await all("v1/cache/segments?limit=1000", (last) => `&after=${last.key}`, MOST, signal);
      setMany(found.rows.length > MANY);
      return found;
    },
    many ? 20000 : 5000,
  );
  const rows = useMemo(() => {
    const wanted = filter.toLowerCase();
    const found = (segments.data?.rows ?? []).filter((row) => `${group(row)} ${title(row)} ${row.key}`.toLowerCase().includes(wanted));
    return found.sort(ORDERS[order][1]);
  }, [segments.data, filter, order]);
  const groups = order === "group" ? grouped(rows) : new Map([["", rows]]);
  const clustered = segments.error?.code === "cluster.not_available";
  const selected = rows.find((row) => row.key === chosen);
  return html`
    ${totals.data && html`<${Tiers} stats=${totals.data} />`}
    <div class="row toolbar">
      <input type="search" placeholder="Filter modules" aria-label="Filter modules" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <div class="choice" role="group" aria-label="Order">
        ${Object.entries(ORDERS).map(
          ([name, [label]]) => html`<button type="button" aria-pressed=${order === name} onClick=${() => setOrder(name)}>${label}</button>`,
        )}
      </div>
    </div>
    ${clustered
      ? html`<${Empty} title="Each replica has its own cache">
          This server is a cluster, and the map shows the cache of one engine only. The answers in the playground show the source of each token.
        <//>`
      : segments.error && html`<${Problem} error=${segments.error} />`}
    ${segments.data &&
    !rows.length &&
    html`<${Empty} title=${filter ? "No module matches" : "Nothing is cached yet"}>
      ${filter ? "Try another word." : "Ask about a document in the playground, or encode a schema. Each module becomes a tile here."}
    <//>`}
    <div class="with-aside" onKeyDown=${(event) => event.key === "Escape" && setChosen(null)}>
      <div>
        ${[...groups].map(([name, some]) => html`<${Tiles} name=${name} rows=${some} chosen=${chosen} choose=${setChosen} key=${name} />`)}
        ${segments.data?.more && html`<p class="note">The first ${count(MOST)} segments are shown.</p>`}
        ${rows.length > 0 && html`<${Legend} />`}
      </div>
      ${selected && html`<${Segment} row=${selected} close=${() => setChosen(null)} changed=${segments.refresh} key=${selected.key} />`}
    </div>
  `;
}

/** The fill of each tier. */
function Tiers({ stats }) {
  const shown = Object.keys(TIERS).filter((name) => stats[name]);
  return html`<ul class="tiers">
    ${shown.map((name) => {
      const tier = stats[name];
      const [used, of] = name === "pool" ? [tier.used_chunks, tier.chunks] : [tier.bytes, tier.quota];
      return html`<li class=${`tier ${name}`} key=${name}>
        <h2><i class=${name}></i>${TIERS[name]}</h2>
        <p class="figure">${compact(tier.tokens)}<small> tokens</small></p>
        <div class="meter" role="img" aria-label=${`${percent(used, of)} full`}><span style=${{ width: of ? `${Math.max(1, (100 * used) / of)}%` : "0" }}></span></div>
        <p class="note">
          ${count(tier.segments)} segments · ${bytes(tier.bytes)}${of ? ` · ${percent(used, of)} full` : ""}
          ${tier.pinned_bytes ? ` · ${bytes(tier.pinned_bytes)} pinned` : ""}${tier.hits != null ? ` · ${count(tier.hits)} hits` : ""}
        </p>
      </li>`;
    })}
  </ul>`;
}

function Tiles({ name, rows, chosen, choose }) {
  const arrows = useArrows(".tile");
  const tokens = rows.reduce((sum, row) => sum + row.tokens, 0);
  return html`<section class="group">
    ${name && html`<h2>${clip(name)} <small>${count(rows.length)} · ${count(tokens)} tokens</small></h2>`}
    <div class="tiles" ...${arrows}>
      ${rows.map(
        (row) =>
          html`<button
            type="button"
            key=${row.key}
            class=${`tile ${row.tiers[0] ?? "gone"} ${spans(row.tokens)} ${age(row)}`}
            aria-pressed=${row.key === chosen}
            onClick=${() => choose(row.key === chosen ? null : row.key)}
            title=${`${title(row)}: ${count(row.tokens)} tokens, ${form(row)}, ${row.tiers.join(" + ") || "evicted"}`}
          >
            <span class="name">${title(row)}</span>
            <span class="tokens">${compact(row.tokens)}</span>
            <span class="facts">
              ${row.pinned && html`<svg viewBox="0 0 12 12" aria-label="pinned"><path d="M4 1h4l-.6 4L9 7H6.5L6 11 5.5 7H3l1.6-2z" /></svg>`}
              ${row.uses ? `×${compact(row.uses)}` : ""} ${row.idle_s == null ? "" : seconds(row.idle_s)}
            </span>
          </button>`,
      )}
    </div>
  </section>`;
}

const age = (row) => (row.idle_s == null ? "" : row.idle_s < 60 ? "fresh" : row.idle_s < 900 ? "" : "old");

const Legend = () =>
  html`<ul class="legend note">
    ${Object.entries(TIERS).map(([name, label]) => html`<li><i class=${name}></i>${label}</li>`)}
    <li>Size: tokens</li>
    <li>×: hits</li>
    <li>Time: since the last read</li>
  </ul>`;

/** One segment in detail, with its text and what can be done with it. */
function Segment({ row, close, changed }) {
  const path = `v1/cache/segments/${row.key}`;
  const detail = usePolling(async (signal) => {
    const found = await get(path, signal);
    const said = found.ids.length ? await call("POST", "detokenize", { tokens: found.ids.slice(0, 600) }, signal) : { prompt: "" };
    return { ...found, text: said.prompt };
  }, 0);
  const done = (method, end) => async () => {
    await call(method, `${path}${end}`);
    changed();
  };
  const facts = [
    ["Schema", row.schema ?? "part of a message"],
    ["Tokens", count(row.tokens)],
    ["Size", bytes(row.bytes)],
    ["Form", form(row)],
    ["Where", row.tiers.map((name) => TIERS[name]).join(", ") || "evicted"],
    ["Codec", row.codec],
    ["Hits", count(row.uses)],
    ["Last read", row.idle_s == null ? "–" : `${seconds(row.idle_s)} ago`],
    ["Lifetime", row.ttl_s == null ? "while there is room" : seconds(row.ttl_s)],
    ["Visible to", row.private ? "this key" : "all keys"],
  ];
  return html`<aside class="card detail" aria-label="Segment">
    <div class="row between">
      <h2>${title(row)}</h2>
      <button type="button" class="button quiet" aria-label="Close" onClick=${close}>✕</button>
    </div>
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${detail.data?.text && html`<pre class="text" tabindex="0">${detail.data.text}${detail.data.ids.length > 600 ? " …" : ""}</pre>`}
    ${detail.error && html`<${Problem} error=${detail.error} />`}
    <p class="key"><code>${row.key.slice(0, 24)}…</code></p>
    <div class="row">
      <${Action} run=${done(row.pinned ? "DELETE" : "PUT", "/pin")}>${row.pinned ? "Unpin" : "Pin"}<//>
      <${Action} kind="danger" run=${done("DELETE", "")}>Evict<//>
    </div>
  </aside>`;
}
