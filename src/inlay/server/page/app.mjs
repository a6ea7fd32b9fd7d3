// The frame of the page: views, theme, key, and the state of the server.

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { get, key } from "./api.mjs";
import { Cache } from "./cache.mjs";
import { html, Mosaic, usePolling } from "./parts.mjs";
import { Playground } from "./playground.mjs";
import { Requests } from "./requests.mjs";
import { Schemas } from "./schemas.mjs";

const VIEWS = [
  ["playground", "Playground", Playground, "M4 5h16v11H9l-5 4z"],
  ["cache", "Cache", Cache, "M4 4h9v9H4zM15 4h5v5h-5zM15 11h5v9h-5zM4 15h9v5H4z"],
  ["requests", "Requests", Requests, "M3 12h4l3-8 4 16 3-8h4"],
  ["schemas", "Schemas", Schemas, "M4 5h16M4 10h10M4 15h16M4 20h7"],
];
const THEMES = ["auto", "light", "dark"];

const viewOf = () => VIEWS.find(([name]) => name === location.hash.slice(2))?.[0] ?? "playground";

function App() {
  const [view, setView] = useState(viewOf());
  const [asks, setAsks] = useState(false);
  const [ready, setReady] = useState(false);
  useEffect(() => {
    const moved = () => setView(viewOf());
    const refused = () => setAsks(true);
    addEventListener("hashchange", moved);
    addEventListener("inlay:key", refused);
    addEventListener("keydown", shortcut);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("inlay:key", refused);
      removeEventListener("keydown", shortcut);
    };
  }, []);
  const models = useRef(null);
  const server = usePolling(async (signal) => {
    await get("ready", signal); // needs no key, and counts toward no limit
    models.current ??= await get("v1/models", signal);
    return models.current;
  }, 10000);
  const model = server.data?.data[0];
  useEffect(() => {
    if (model) {
      setReady(true);
      document.title = `${model.id} · inlay`;
    }
  }, [model]);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    <header>
      <a class="brand" href="#/playground"><${Mosaic} />inlay</a>
      <nav aria-label="Views">
        ${VIEWS.map(
          ([name, title, , icon], number) =>
            html`<a href=${`#/${name}`} aria-current=${view === name ? "page" : null} title=${`${title} (${number + 1})`}>
              <svg viewBox="0 0 24 24" aria-hidden="true"><path d=${icon} /></svg>${title}
            </a>`,
        )}
      </nav>
      <div class="status">
        <span class=${`dot ${server.error ? "bad" : model ? "good" : ""}`} aria-hidden="true"></span>
        <span class="model" title=${model?.root}>${model?.id ?? "…"}</span>
        ${key.get() && html`<button type="button" class="button quiet" onClick=${() => setAsks(true)}>Key</button>`}
        <${Theme} />
      </div>
    </header>
    ${server.error && server.error.status !== 401 && html`<p class="banner" role="status">${server.error.message}</p>`}
    <main id="main" tabindex="-1">
      ${VIEWS.map(
        // The playground stays, so that a running answer and the conversation survive a look at another view.
        ([name, , View]) =>
          ready &&
          (view === name || name === "playground") &&
          html`<section class=${`view ${name}`} hidden=${view !== name} key=${name} aria-label=${name}>
            <${View} model=${model} models=${server.data?.data ?? []} shown=${view === name} />
          </section>`,
      )}
      ${!ready && !server.error && html`<p class="loading">Connecting…</p>`}
    </main>
    ${asks && html`<${KeyDialog} close=${() => setAsks(false)} />`}
  `;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** Number keys choose a view, and / goes to the question, unless somebody types. */
function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, dialog")) return;
  const view = VIEWS[Number(event.key) - 1];
  if (view) location.hash = `#/${view[0]}`;
  if (event.key === "/") {
    event.preventDefault();
    location.hash = "#/playground";
    setTimeout(() => document.querySelector("#question")?.focus());
  }
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("inlay-theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("inlay-theme", theme);
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`<button
    type="button"
    class="button quiet theme"
    title=${`Theme: ${theme}`}
    aria-label=${`Theme is ${theme}. Switch to ${next}.`}
    onClick=${() => setTheme(next)}
  >
    <svg viewBox="0 0 24 24" aria-hidden="true">
      ${theme === "dark"
        ? html`<path d="M20 14a8 8 0 1 1-9-10 7 7 0 0 0 9 10z" />`
        : theme === "light"
          ? html`<circle cx="12" cy="12" r="4.5" /><path d="M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M19 5l-2 2M7 17l-2 2" />`
          : html`<circle cx="12" cy="12" r="8.5" /><path class="full" d="M12 3.5v17a8.5 8.5 0 0 0 0-17z" />`}
    </svg>
  </button>`;
}

function KeyDialog({ close }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  function save(event) {
    event.preventDefault();
    const value = new FormData(event.target).get("key").trim();
    if (value) key.set(value);
    else key.forget();
    dialog.current.close();
    dispatchEvent(new CustomEvent("inlay:changed"));
  }
  function forget() {
    key.forget();
    location.reload();
  }
  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="key-title">
    <form onSubmit=${save}>
      <h2 id="key-title">This server has keys</h2>
      <p>The key stays in this tab. Closing the tab forgets it.</p>
      <label>API key<input name="key" type="password" autocomplete="off" spellcheck="false" autofocus /></label>
      <div class="row end">
        ${key.get() && html`<button type="button" class="button quiet" onClick=${forget}>Forget the key</button>`}
        <button class="button main">Use this key</button>
      </div>
    </form>
  </dialog>`;
}

render(html`<${App} />`, document.getElementById("app"));
