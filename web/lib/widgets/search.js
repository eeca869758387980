// Search in all headings. Library and index are loaded when the box first has the focus; `/` goes there.
"use strict";

customElements.define(
  "kt-search",
  class extends HTMLElement {
    connectedCallback() {
      const form = document.createElement("form");
      form.setAttribute("role", "search");
      const label = Object.assign(document.createElement("label"), { className: "unseen", textContent: "Search this site" });
      this.input = Object.assign(document.createElement("input"), {
        id: "search", type: "search", placeholder: "Search ( / )", autocomplete: "off",
      });
      label.htmlFor = this.input.id;
      this.told = Object.assign(document.createElement("output"), { className: "unseen" });
      this.told.setAttribute("aria-live", "polite");
      this.list = Object.assign(document.createElement("ul"), { className: "found", hidden: true });
      this.list.setAttribute("aria-label", "Found");
      form.append(label, this.input, this.told, this.list);
      this.append(form);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.list.querySelector("a")?.click();
      });
      this.input.addEventListener("focus", () => this.load());
      this.input.addEventListener("input", () => this.search());
      form.addEventListener("keydown", (event) => this.move(event));
      form.addEventListener("focusout", ({ relatedTarget }) => { if (!form.contains(relatedTarget)) this.list.hidden = true; });
      document.addEventListener("keydown", (event) => {
        if (event.key !== "/" || event.target.closest("input, textarea, select, [contenteditable]")) return;
        event.preventDefault();
        this.input.focus();
      });
    }

    load() {
      this.index ??= Promise.all([KT.load("search"), KT.script("vendor/minisearch.min.js")]).then(([rows]) => {
        const index = new MiniSearch({
          fields: ["title", "name", "page", "text"],
          storeFields: ["href", "title", "page", "text"],
          searchOptions: {
            boost: { title: 4, name: 3, page: 2 }, prefix: true, combineWith: "AND",
            boostDocument: (id) => (rows[id][0].startsWith("log/") ? 0.5 : 1), // repeats the ladders' headings
          },
          tokenize: (text) => text.toLowerCase().split(/[\s\p{P}\p{S}]+/u),
        });
        index.addAll(rows.map(([place, anchor, title, page, text], id) => ({
          id, href: place + (anchor ? `#${anchor}` : ""), title, name: anchor, page, text,
        })));
        return index;
      });
      return this.index;
    }

    async search() {
      const wanted = this.input.value.trim();
      const index = await this.load();
      if (wanted !== this.input.value.trim()) return;
      const exact = wanted ? index.search(wanted) : [];
      const found = exact.length || !wanted ? exact : index.search(wanted, { fuzzy: 0.2, combineWith: "OR" });
      this.list.replaceChildren(...found.slice(0, 12).map((each) => this.item(each)));
      this.list.hidden = !found.length;
      this.told.value = wanted ? `${found.length} found` : "";
      this.dataset.found = wanted;
    }

    item({ href, title, page, text }) {
      const link = Object.assign(document.createElement("a"), { href: KT.root + href });
      const head = Object.assign(document.createElement("strong"), { textContent: title });
      link.append(head, page ? ` · ${page}` : "", Object.assign(document.createElement("small"), { textContent: text }));
      link.addEventListener("click", () => { this.list.hidden = true; });
      const item = document.createElement("li");
      item.append(link);
      return item;
    }

    // Up and down through the box and what was found; Escape closes the list.
    move(event) {
      if (event.key === "Escape" && !this.list.hidden) {
        event.preventDefault();
        this.input.focus();
        this.list.hidden = true;
      }
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || this.list.hidden) return;
      event.preventDefault();
      const stops = [this.input, ...this.list.querySelectorAll("a")];
      stops[(stops.indexOf(document.activeElement) + step + stops.length) % stops.length].focus();
    }
  },
);
