// What every page has: data that are loaded on demand, and where cards lie.
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

  // Puts a card below a place, above where there is no room, and never past the window's side.
  place(card, at) {
    const { width, height } = card.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8));
    const top = at.bottom + height + 4 > innerHeight && at.top > height + 4 ? at.top - height - 4 : at.bottom + 4;
    card.style.left = `${left + scrollX}px`;
    card.style.top = `${top + scrollY}px`;
  },

  root: document.querySelector("link[rel=stylesheet]").getAttribute("href").replace(/kt\.css$/, ""),
};

// JSON, deflated, in base64: code and the compilers' stages take a sixth of their room.
function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}
