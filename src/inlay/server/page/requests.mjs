// The running requests and the latest ended ones, with their tokens and their time.

import { get } from "./api.mjs";
import { clip, count, Empty, html, phases, Phases, Problem, seconds, Split, usePolling } from "./parts.mjs";

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const STATES = { waiting: "Waiting", generating: "Generating", ended: "Done" };

export function Requests() {
  const { data, error } = usePolling((signal) => get("v1/requests?limit=200", signal), 2000);
  const rows = data?.data ?? [];
  const running = rows.filter((row) => row.state !== "ended");
  const ended = rows.filter((row) => row.state === "ended");
  const longest = Math.max(...rows.map((row) => Object.values(phases(row.timing)).reduce((sum, one) => sum + one, 0)), 0.001);
  const tenants = new Set(rows.map((row) => row.tenant)).size > 1;
  const table = (some) => html`<ul class="requests">${some.map((row, number) => html`<${Row} row=${row} longest=${longest} tenants=${tenants} key=${row.id ?? number} />`)}</ul>`;
  return html`
    ${error && html`<${Problem} error=${error} />`}
    <h2>Running <small>${count(running.length)}</small></h2>
    ${running.length ? table(running) : data && html`<p class="note">No request is running.</p>`}
    <h2>Latest <small>${count(ended.length)}</small></h2>
    ${ended.length > 0 && table(ended)}
    ${data && !rows.length && html`<${Empty} title="No requests yet">Requests appear here when they arrive, with the source of their tokens and the phases of their time.<//>`}
    ${rows.length > 0 &&
    html`<ul class="legend note">
      <li><i class="exact"></i>exact</li>
      <li><i class="module"></i>module</li>
      <li><i class="computed"></i>computed</li>
      <li class="gap"><i class="queue"></i>queue</li>
      <li><i class="load"></i>load</li>
      <li><i class="prefill"></i>prefill</li>
      <li><i class="decode"></i>decode</li>
    </ul>`}
  `;
}

function Row({ row, longest, tenants }) {
  const failed = row.status != null && row.status !== 200;
  return html`<li class=${`request ${row.state} ${failed ? "failed" : ""}`}>
    <div class="what">
      <span class="state" title=${row.id}><i></i>${failed ? (row.status === 499 ? "Client left" : row.status) : STATES[row.state]}</span>
      <span class="note">${clock.format(1000 * row.created)} · ${row.endpoint.replace("/v1/", "")}${tenants ? ` · ${clip(row.tenant, 24)}` : ""}${row.error ? ` · ${row.error}` : ""}</span>
    </div>
    <div class="tokens">
      ${row.prompt_tokens == null ? html`<p class="note">prompt is not laid out yet</p>` : html`<${Split} usage=${row} />`}
    </div>
    <div class="answer"><b>${count(row.generated_tokens)}</b><span class="note"> tokens</span></div>
    <div class="time">
      <${Phases} timing=${row.timing} longest=${longest} />
      <span class="note">${row.timing.ttft_s == null ? "" : `first token ${seconds(row.timing.ttft_s)} · `}${seconds(row.seconds)}</span>
    </div>
    <div class="policy note">${row.reuse ?? ""}</div>
  </li>`;
}
