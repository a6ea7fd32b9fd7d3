// The schemas of the server: modules and their encoded tokens, versions, sources, advice and divergence.

import { useState } from "preact/hooks";
import { all, call, get } from "./api.mjs";
import { Action, bytes, count, Empty, html, percent, Problem, usePolling } from "./parts.mjs";

const when = (time) => new Date(1000 * time).toLocaleString();
const named = (name) => `v1/schemas/${encodeURIComponent(name)}`;

export function Schemas() {
  const [chosen, setChosen] = useState(null);
  const list = usePolling((signal) => all("v1/schemas?limit=100", (last) => `&after=${encodeURIComponent(last.name)}`, 400, signal), 5000);
  const divergence = usePolling((signal) => get("v1/divergence", signal), 10000);
  const rows = list.data?.rows ?? [];
  const name = rows.some((row) => row.name === chosen) ? chosen : rows[0]?.name;
  if (list.data && !rows.length)
    return html`<${Empty} title="No schemas">Start the server with --schema FILE, or create one with POST /v1/schemas.<//>`;
  return html`
    ${list.error && html`<${Problem} error=${list.error} />`}
    <div class="master">
      <nav class="names" aria-label="Schemas">
        ${rows.map(
          (row) => html`<button type="button" key=${row.name} aria-pressed=${row.name === name} onClick=${() => setChosen(row.name)}>
            <b>${row.name}</b>
            <small>v${row.version} · ${count(row.modules)} modules · ${count(row.tokens)} tokens${row.public ? "" : " · yours"}</small>
          </button>`,
        )}
      </nav>
      ${name && html`<${Detail} name=${name} key=${name} changed=${list.refresh} />`}
    </div>
    ${divergence.data && html`<${Divergence} found=${divergence.data} />`}
  `;
}

function Detail({ name, changed }) {
  const [tab, setTab] = useState("modules");
  const schema = usePolling((signal) => get(`${named(name)}?source=true`, signal), 4000);
  const advice = usePolling((signal) => get(`${named(name)}/advice`, signal), 0, [schema.data?.etag]);
  const found = schema.data;
  const done = (method, end, body) => async () => {
    await call(method, `${named(name)}${end}`, body);
    schema.refresh();
    changed();
  };
  if (!found) return schema.error ? html`<${Problem} error=${schema.error} />` : html`<p class="loading">Loading…</p>`;
  const found_advice = advice.data?.data.length ?? 0;
  const tabs = { modules: "Modules", source: "Source", versions: `Versions (${found.versions.length})`, advice: `Advice (${found_advice})` };
  const encoded = found.encoded;
  return html`<article class="card schema">
    <div class="row between">
      <div>
        <h2>${found.name}</h2>
        <p class="note">version ${found.version} · ${count(found.tokens)} tokens · ${count(found.length)} positions${found.reuse ? ` · ${found.reuse}` : ""}</p>
      </div>
      <div class="row">
        <${Action} run=${done("POST", "/warm", {})}>Encode<//>
        <${Action} run=${done(found.pinned ? "DELETE" : "PUT", "/pin")}>${found.pinned ? "Unpin" : "Pin"}<//>
      </div>
    </div>
    <div class="meter" role="img" aria-label=${`${percent(encoded.tokens, encoded.of)} encoded`}><span style=${{ width: `${encoded.of ? (100 * encoded.tokens) / encoded.of : 0}%` }}></span></div>
    <p class="note">${count(encoded.tokens)} of ${count(encoded.of)} tokens are encoded, ${bytes(encoded.bytes)}</p>
    <div class="tabs" role="tablist">
      ${Object.entries(tabs).map(
        ([id, label]) => html`<button type="button" role="tab" id=${`tab-${id}`} aria-selected=${tab === id} aria-controls="panel" onClick=${() => setTab(id)}>${label}</button>`,
      )}
    </div>
    <div role="tabpanel" id="panel" aria-labelledby=${`tab-${tab}`}>
      ${tab === "modules" && html`<ul class="tree"><li><${Bar} name="always" node=${found.always} /></li>${found.modules.map((node) => html`<${Node} node=${node} />`)}</ul>`}
      ${tab === "modules" && found.has_more && html`<p class="note">The first modules are shown.</p>`}
      ${tab === "source" && html`<pre class="text source" tabindex="0">${source(found)}</pre>`}
      ${tab === "versions" && html`<${Versions} schema=${found} />`}
      ${tab === "advice" && html`<${Advice} advice=${advice} />`}
    </div>
  </article>`;
}

const source = (found) => found.source?.pml ?? JSON.stringify(found.source?.schema ?? found.source, null, 2);

function Node({ node }) {
  if (node.union) return html`<li class="union"><span class="note">one of</span><ul>${node.union.map((one) => html`<${Node} node=${one} />`)}</ul></li>`;
  return html`<li>
    <${Bar} name=${node.module.split("/").at(-1)} node=${node} />
    ${node.params.map((param) => html`<span class="param" title=${param.default ?? ""}>${param.param} <small>≤ ${param.len} tokens</small></span>`)}
    ${node.modules.length > 0 && html`<ul>${node.modules.map((one) => html`<${Node} node=${one} />`)}</ul>`}
  </li>`;
}

const Bar = ({ name, node }) =>
  html`<div class="module">
    <span>${name}</span>
    <span class="note">${count(node.tokens)} tokens</span>
    <span class=${`badge ${node.encoded.of && node.encoded.tokens === node.encoded.of ? "good" : ""}`}>
      ${!node.encoded.of ? "no text" : node.encoded.tokens === node.encoded.of ? "encoded" : node.encoded.tokens ? percent(node.encoded.tokens, node.encoded.of) : "not encoded"}
    </span>
  </div>`;

function Versions({ schema }) {
  const [shown, setShown] = useState(null);
  const past = usePolling(async (signal) => (shown ? get(`${named(schema.name)}/versions/${shown}`, signal) : null), 0, [shown]);
  return html`<div class="scroll"><table>
      <thead><tr><th>Version</th><th>Created</th><th>sha256</th><th></th></tr></thead>
      <tbody>
        ${[...schema.versions].reverse().map(
          (one) => html`<tr key=${one.version}>
            <td>${one.version}</td>
            <td>${when(one.created)}</td>
            <td><code>${one.sha256.slice(0, 12)}</code></td>
            <td><button type="button" class="button quiet" onClick=${() => setShown(one.version)}>Show</button></td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${past.error && html`<${Problem} error=${past.error} />`}
    ${past.data && html`<pre class="text source" tabindex="0">${past.data.source ? source(past.data) : "The text of this version is no longer kept."}</pre>`}`;
}

function Advice({ advice }) {
  if (advice.error) return html`<${Problem} error=${advice.error} />`;
  if (!advice.data) return html`<p class="loading">Loading…</p>`;
  if (!advice.data.data.length) return html`<p class="note">There is no advice: nothing here costs memory, positions or reuse.</p>`;
  return html`<ul class="advice">
    ${advice.data.data.map(
      (one) => html`<li>
        <b>${one.rule}</b> <small>${one.line != null ? `line ${one.line}` : (one.path ?? "")}</small>
        <p>${one.message}</p>
      </li>`,
    )}
  </ul>`;
}

function Divergence({ found }) {
  if (!found.shadow && !found.data.length)
    return html`<p class="note">Start the server with <code>--shadow 0.01</code> to measure the divergence of answers from full prefill.</p>`;
  return html`<section class="card">
    <h2>Divergence from full prefill</h2>
    ${found.data.length > 0 &&
    html`<div class="scroll"><table class="stacked">
      <thead><tr><th>Schema</th><th>Policy</th><th>Answers</th><th>Nats per token</th><th>Same top token</th></tr></thead>
      <tbody>
        ${found.data.map(
          (row) => html`<tr>
            <td>${row.schema || "(messages)"}</td>
            <td data-name="Policy">${row.reuse}${row.taken ? ` → ${row.taken}` : ""}</td>
            <td data-name="Answers">${count(row.samples)}</td>
            <td data-name="Nats per token">${row.kl.toFixed(4)}</td>
            <td data-name="Same top token">${percent(row.top1, 1)}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>`}
    ${!found.data.length && html`<p class="note">No answer has been compared yet.</p>`}
  </section>`;
}
