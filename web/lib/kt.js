// What every page has: data that are loaded on demand, and the address's hash.
"use strict";

const KT = {
  data: new Map(),

  // Payloads are scripts that call this: a page opened from disk may not fetch.
  put(name, value) {
    KT.data.set(name, value);
  },

  load(name) {
    if (KT.data.has(name)) return Promise.resolve(KT.data.get(name));
    return KT.script(`data/${name}.js`).then(() => KT.data.get(name));
  },

  // Runs a script of the site, such as a library that few readers need.
  script(place) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = KT.root + place;
      script.onload = () => resolve();
      script.onerror = () => reject(new Error(`${place} cannot be loaded`));
      document.head.append(script);
    });
  },

  root: document.querySelector("link[rel=stylesheet]").getAttribute("href").replace(/kt\.css$/, ""),
};

// Hovering over a number, or focusing what it stands in, tells its row and the run that measured it.
async function tell(number) {
  const { src } = number.dataset;
  const source = src.startsWith("/") ? number.closest("table").dataset.base + src : src;
  number.title = source;
  const [, op, call] = /^(\w+)\.(?:timings|counters)\.csv#([^/]+\/[^/|]+\/[^/|]+)/.exec(source) ?? [];
  if (!op) return;
  const { told, of } = await KT.load("runs");
  number.title = `${source}\n${told[of[op][call] ?? of[op][""]]}`;
}

addEventListener("pointerover", ({ target }) => {
  const number = target.closest("data[data-src]:not([title])");
  if (number) tell(number);
});
addEventListener("focusin", ({ target }) => {
  target.querySelectorAll("data[data-src]:not([title])").forEach(tell);
});
