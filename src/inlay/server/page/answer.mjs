// One question with its answer: tokens, times, the source of each module, and the answer of full prefill beside it.

import { divergence } from "./ask.mjs";
import { count, html, percent, Problem, seconds, Split, TIERS } from "./parts.mjs";

export function Turn({ turn }) {
  const { reused, full, error } = turn;
  const compared = reused?.total_s != null && full?.total_s != null ? divergence(reused, full) : null;
  return html`<article class="turn" aria-busy=${Boolean(turn.running)}>
    <p class="question">${turn.question}</p>
    <div class=${turn.compares ? "columns" : ""}>
      <${Answer} title=${turn.compares ? "With reuse" : ""} answer=${reused} same=${compared?.text} running=${turn.running === "reused"} />
      ${turn.compares && html`<${Answer} title="Full prefill" answer=${full} same=${compared?.text} running=${turn.running === "full"} />`}
    </div>
    ${compared && html`<${Compared} reused=${reused} full=${full} found=${compared} />`}
    ${error && html`<${Problem} error=${error} />`}
    ${reused?.inlay?.diagnostics?.[0] && html`<${Diagnosis} found=${reused.inlay.diagnostics[0]} name=${turn.name} />`}
  </article>`;
}

function Answer({ title, answer, same, running }) {
  const inlay = answer?.inlay;
  const [head, tail] = same !== undefined && answer.text.startsWith(same) ? [same, answer.text.slice(same.length)] : [answer?.text ?? "", ""];
  return html`<div class="answer">
    ${title && html`<h3>${title}</h3>`}
    ${answer?.thought && html`<details class="thought"><summary>Reasoning</summary>${answer.thought}</details>`}
    <p class=${`text ${running ? "running" : ""}`}>${head}${tail && html`<mark title="Differs from the other answer">${tail}</mark>`}</p>
    ${answer?.reason === "length" && html`<p class="note">The answer was cut at the most tokens.</p>`}
    ${inlay &&
    html`<div class="figures">
        <div><b>${seconds(inlay.timing.ttft_s ?? answer.first_s)}</b><span>first token</span></div>
        <div><b>${percent(inlay.exact_tokens + inlay.module_tokens, answer.usage.prompt_tokens)}</b><span>from the cache</span></div>
        <div><b>${count(inlay.computed_tokens)}</b><span>computed of ${count(answer.usage.prompt_tokens)}</span></div>
        <div><b>${speed(answer)}</b><span>tokens/s</span></div>
      </div>
      <${Split} usage=${inlay} />`}
  </div>`;
}

function speed(answer) {
  const { ttft_s: first, total_s: total } = answer.inlay.timing;
  const tokens = answer.usage.completion_tokens;
  return first != null && total > first && tokens > 1 ? count(Math.round((tokens - 1) / (total - first))) : "–";
}

function Compared({ reused, full, found }) {
  const [with_, without] = [reused.inlay?.timing.ttft_s, full.inlay?.timing.ttft_s];
  const times = with_ && without ? without / with_ : null;
  const tokens = Math.max(reused.steps.length, full.steps.length);
  return html`<dl class="compared">
    <div><dt>First token</dt><dd>${times == null ? "–" : times >= 1 ? `${times.toFixed(1)}× faster` : `${(1 / times).toFixed(1)}× slower`}</dd></div>
    <div><dt>Computed tokens</dt><dd>${count(reused.inlay?.computed_tokens)} instead of ${count(full.inlay?.computed_tokens)}</dd></div>
    <div><dt>Answer</dt><dd>${found.equal ? "the same tokens" : `the same for ${count(found.same)} of ${count(tokens)} tokens`}</dd></div>
    <div title="KL of full prefill and reuse over the 20 likeliest tokens of each step, while both answers agree. A lower bound.">
      <dt>Divergence</dt><dd>${found.steps ? found.kl < 0.00005 ? "≈ 0 nats per token" : `≥ ${found.kl.toPrecision(2)} nats per token` : "–"}</dd>
    </div>
  </dl>`;
}

function Diagnosis({ found, name }) {
  const { modules, causes, departure } = found;
  if (!modules.length && !causes.length) return null;
  return html`<details class="diagnosis">
    <summary>Where the tokens came from</summary>
    ${modules.length > 0 &&
    html`<div class="scroll"><table class="stacked">
      <thead><tr><th>Module</th><th>Tokens</th><th>Form</th><th>From</th><th>Shift</th><th>Computed</th></tr></thead>
      <tbody>
        ${modules.map(
          (one) => html`<tr>
            <td>${name(one.name)}</td>
            <td data-name="Tokens">${count(one.tokens)}</td>
            <td data-name="Form">${one.form}</td>
            <td data-name="From">${one.tier ? html`<i class=${one.tier}></i>${TIERS[one.tier]}` : "–"}</td>
            <td data-name="Shift">${one.shift > 0 ? `+${count(one.shift)}` : count(one.shift)}</td>
            <td data-name="Computed">${count(one.computed_tokens + one.recomputed_tokens)}${one.reason ? html` <small>${one.reason}</small>` : ""}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>`}
    ${causes.length > 0 &&
    html`<ul class="causes">
      ${causes.map(
        (one) => html`<li><b>${count(one.tokens)} computed: ${one.kind}</b> <small>${name(one.place)}</small><p>${one.message} ${one.remedy}</p></li>`,
      )}
    </ul>`}
    ${departure && html`<p class="note">It leaves the nearest stored prompt at token ${count(departure.token)}: “${departure.stored_text}” became “${departure.new_text}”.</p>`}
  </details>`;
}
