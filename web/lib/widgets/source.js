// A file of code, by the path that the address's hash names.
"use strict";

customElements.define(
  "kt-source",
  class extends HTMLElement {
    connectedCallback() {
      addEventListener("hashchange", () => this.show());
      this.show();
    }

    async show() {
      const path = decodeURIComponent(location.hash.slice(1));
      const file = document.getElementById(path);
      this.replaceChildren();
      if (!file?.dataset.code) return;
      const { lines, files } = await KT.load(`code-${file.dataset.code}`);
      const title = Object.assign(document.createElement("h2"), { tabIndex: -1 });
      title.append(Object.assign(document.createElement("code"), { textContent: path }));
      const list = Object.assign(document.createElement("ol"), { className: "lines wide", tabIndex: 0 });
      list.setAttribute("aria-label", `${files[path].length} lines`);
      for (const index of files[path]) {
        const line = document.createElement("li");
        line.innerHTML = `${lines[index]}\n`;
        list.append(line);
      }
      this.replaceChildren(title, list);
      this.scrollIntoView();
      title.focus();
    }
  },
);
