// Requests for answers: their bodies, their streams, and the divergence of two answers to one prompt.

import { stream } from "./api.mjs";

const PATH = "v1/chat/completions";
const MARK = { type: "ephemeral" };
const TOP = 20;

/** The conversation as chat messages. Documents are marked parts in front of the first question. */
export function messages(system, documents, turns, question) {
  const marked = documents.map((one) => ({ type: "text", text: one.text, cache_control: MARK }));
  const asked = [...turns.map((turn) => [turn.question, turn.reused.text]), [question, null]];
  const made = system ? [{ role: "system", content: system }] : [];
  asked.forEach(([text, answer], number) => {
    const parts = number ? [] : marked;
    made.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
    if (answer !== null) made.push({ role: "assistant", content: answer });
  });
  return made;
}

/** The prompt of a schema: the chosen modules with their arguments, then the question. */
export function schemaPrompt(schema, chosen, given, question) {
  const imported = (nodes) =>
    nodes.flatMap((node) => {
      if (node.union) return imported(node.union);
      if (!chosen.has(node.module)) return [];
      const found = { import: node.module.split("/").at(-1) };
      const filled = node.params.map((param) => [param.param, given[`${node.module} ${param.param}`]]).filter(([, text]) => text);
      if (filled.length) found.arguments = Object.fromEntries(filled);
      const inside = imported(node.modules);
      if (inside.length) found.content = inside;
      return [found];
    });
  return { schema: schema.name, content: [...imported(schema.modules), question] };
}

/** The fields of a body that the settings determine. */
export function fields(settings, compares) {
  // Two answers can be compared only if chance plays no part.
  const found = { max_tokens: settings.length, temperature: compares ? 0 : settings.temperature };
  if (settings.model) found.model = settings.model;
  if (settings.reuse) found.reuse = settings.reuse;
  if (settings.recompute) found.recompute = settings.recompute;
  if (compares) Object.assign(found, { logprobs: true, top_logprobs: TOP });
  return found;
}

/** The same request without reuse. */
export function withoutReuse({ recompute, order, ...body }) {
  return { ...body, reuse: "off" };
}

/** Ask, and report the answer so far after each event. Returns the whole answer. */
export async function ask(body, report, signal) {
  const began = performance.now();
  const answer = { text: "", thought: "", steps: [], usage: null, inlay: null, reason: null, first_s: null, total_s: null };
  const asked = { ...body, diagnostics: true, stream_options: { include_usage: true } };
  for await (const event of stream(PATH, asked, signal)) {
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    if (answer.first_s === null && (delta.content || delta.reasoning_content)) answer.first_s = (performance.now() - began) / 1000;
    answer.text += delta.content ?? "";
    answer.thought += delta.reasoning_content ?? "";
    answer.steps.push(...(choice?.logprobs?.content ?? []));
    answer.reason = choice?.finish_reason ?? answer.reason;
    answer.usage = event.usage ?? answer.usage;
    answer.inlay = event.inlay ?? answer.inlay;
    report({ ...answer });
  }
  answer.total_s = (performance.now() - began) / 1000;
  report({ ...answer });
  return answer;
}

const bytesOf = (token) => (token.bytes ?? [token.token]).join();

/** KL(full ‖ reused) of one step, over the tokens that both list and the rest as one. It is a lower bound, in nats. */
function stepDivergence(full, reused) {
  const other = new Map(reused.top_logprobs.map((token) => [bytesOf(token), token.logprob]));
  let kl = 0;
  let rest = 1;
  let restOther = 1;
  for (const token of full.top_logprobs) {
    const found = other.get(bytesOf(token));
    if (found === undefined) continue;
    const probability = Math.exp(token.logprob);
    kl += probability * (token.logprob - found);
    rest -= probability;
    restOther -= Math.exp(found);
  }
  if (rest > 1e-6 && restOther > 1e-6) kl += rest * Math.log(rest / restOther);
  return Math.max(0, kl);
}

/**
 * How far an answer is from that of full prefill.
 *
 * Steps are comparable as long as both answers have the same tokens before them. `same` counts those tokens, `steps`
 * the compared steps, and `kl` is their mean divergence in nats per token.
 */
export function divergence(reused, full) {
  const [a, b] = [reused.steps, full.steps];
  let same = 0;
  while (same < a.length && same < b.length && bytesOf(a[same]) === bytesOf(b[same])) same += 1;
  const steps = Math.min(same + 1, a.length, b.length);
  let kl = 0;
  for (let step = 0; step < steps; step += 1) kl += stepDivergence(b[step], a[step]);
  const text = a.slice(0, same).map((token) => token.token).join("");
  return { same, steps, kl: steps ? kl / steps : 0, equal: same === a.length && same === b.length, text };
}
