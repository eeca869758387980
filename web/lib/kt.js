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
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${KT.root}data/${name}.js`;
      script.onload = () => resolve(KT.data.get(name));
      script.onerror = () => reject(new Error(`data/${name}.js cannot be loaded`));
      document.head.append(script);
    });
  },

  root: document.querySelector("link[rel=stylesheet]").getAttribute("href").replace(/kt\.css$/, ""),
};
