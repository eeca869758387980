// Filters of the scoreboard, kept in the address's hash.
"use strict";

customElements.define(
  "kt-scoreboard",
  class extends HTMLElement {
    connectedCallback() {
      this.rows = [...this.querySelectorAll("tbody tr")];
      this.caption = this.querySelector("caption").firstChild;
      const bar = document.createElement("div");
      bar.className = "filters";
      this.selects = ["family", "op", "dtype", "backend", "verdict"].map((key) => this.select(key, bar));
      this.prepend(bar);
      this.restore();
      addEventListener("hashchange", () => this.restore());
    }

    select(key, bar) {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.name = key;
      const values = [...new Set(this.rows.map((row) => row.dataset[key]))].sort();
      select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
      select.addEventListener("change", () => {
        const chosen = this.selects.filter((each) => each.value).map((each) => [each.name, each.value]);
        history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
        this.apply();
      });
      label.append(`${key} `, select);
      bar.append(label);
      return select;
    }

    restore() {
      const wanted = new URLSearchParams(location.hash.slice(1));
      for (const select of this.selects) select.value = wanted.get(select.name) ?? "";
      this.apply();
    }

    apply() {
      const chosen = this.selects.filter((each) => each.value);
      let shown = 0;
      for (const row of this.rows) {
        row.hidden = chosen.some((each) => row.dataset[each.name] !== each.value);
        shown += !row.hidden;
      }
      this.caption.textContent = `${shown} contests `;
    }
  },
);
