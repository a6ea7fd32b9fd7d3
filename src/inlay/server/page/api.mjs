// The server's HTTP API. Paths are relative to the page, so that a proxy may put it under a prefix.

const KEY = "inlay-key";

/** The key of this tab. It is forgotten when the tab closes. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** An error of the server, with its code and the seconds until a retry may help. */
export class ApiError extends Error {
  constructor(message, status, code, retry = 0) {
    super(message);
    this.status = status;
    this.code = code;
    this.retry = retry;
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0, "unreachable");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const told = answer.error ?? {};
  if (response.status === 401) dispatchEvent(new CustomEvent("inlay:key"));
  const retry = Number(response.headers.get("Retry-After")) || 0;
  throw new ApiError(told.message ?? `The server answers ${response.status}.`, response.status, told.code, retry);
}

/** The JSON answer to a request. */
export async function call(method, path, body, signal) {
  return (await send(method, path, body, signal)).json();
}

export const get = (path, signal) => call("GET", path, undefined, signal);

/** The events of a stream, as values. An error event is thrown. */
export async function* stream(path, body, signal) {
  const response = await send("POST", path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 200, event.error.code);
      yield event;
    }
  }
}

/** All entries of a list in pages, at most `most` of them. `next` returns the query of the page after an entry. */
export async function all(path, next, most, signal) {
  const found = [];
  let query = "";
  while (found.length < most) {
    const page = await get(`${path}${query}`, signal);
    found.push(...page.data);
    if (!page.has_more || !page.data.length) return { rows: found, more: false };
    query = next(page.data.at(-1));
  }
  return { rows: found.slice(0, most), more: true };
}
