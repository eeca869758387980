// What every page has: data that are loaded on demand, and the address's hash.
"use strict";

const KT = {
  data: new Map(),

  // Payloads are scripts that call this: a page opened from disk may not fetch.
  put(name, packed) {
    KT.data.set(name, unpacked(packed));
  },

  async load(name) {
    if (!KT.data.has(name)) await KT.script(`data/${name}.js`);
    return KT.data.get(name);
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

// JSON, deflated, in base64: code and the compilers' stages take a sixth of their room.
function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

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
