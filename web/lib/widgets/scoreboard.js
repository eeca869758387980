// The scoreboard: filters, search, order and means of the rows that are shown; its state is the address's hash.
"use strict";

customElements.define(
  "kt-scoreboard",
  class extends HTMLElement {
    connectedCallback() {
      const board = this.querySelector(".board");
      this.body = board.tBodies[0];
      this.rows = [...this.body.rows];
      this.heads = [...board.querySelectorAll("th[data-sort]")];
      this.bar = this.querySelector(".filters");
      this.controls = [...this.bar.querySelectorAll("select, input")];
      this.told = this.bar.querySelector("output");
      this.bar.hidden = false;
      for (const control of this.controls) control.addEventListener("input", () => this.store());
      this.bar.querySelector("[name=reset]").addEventListener("click", () => this.reset());
      this.bar.querySelector("[name=copy]").addEventListener("click", () => this.copy());
      for (const head of this.heads) this.sortable(head);
      addEventListener("hashchange", () => this.restore());
      this.restore();
    }

    sortable(head) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => {
        const down = this.order.key === head.dataset.sort && !this.order.down;
        this.order = { key: head.dataset.sort, down };
        this.store();
      });
      head.append(button);
    }

    reset() {
      for (const control of this.controls) control.value = "";
      this.order = { key: "", down: false };
      this.store();
    }

    // What is chosen, without the order, as sources of numbers name it.
    get choice() {
      const chosen = this.controls.filter((each) => each.value.trim()).map((each) => [each.name, each.value.trim()]);
      return new URLSearchParams(chosen);
    }

    store() {
      const state = this.choice;
      if (this.order.key) state.set(this.order.down ? "down" : "up", this.order.key);
      history.replaceState(null, "", String(state) ? `#${state}` : location.pathname + location.search);
      this.apply();
    }

    restore() {
      const wanted = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
      for (const control of this.controls) control.value = wanted.get(control.name) ?? "";
      for (const control of this.controls) if (control.selectedIndex === -1) control.value = "";
      this.order = { key: wanted.get("down") ?? wanted.get("up") ?? "", down: wanted.has("down") };
      this.apply();
    }

    apply() {
      const choice = this.choice;
      const words = (choice.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      choice.delete("q");
      const keys = [...choice];
      for (const row of this.rows) {
        const its = row.dataset;
        row.hidden = keys.some(([key, value]) => its[key] !== value) || words.some((word) => !its.words.includes(word));
      }
      this.arrange();
      this.mean();
      this.told.value = `${this.shown.length} of ${this.rows.length} rows`;
    }

    get shown() {
      return [...this.body.rows].filter((row) => !row.hidden);
    }

    arrange() {
      const { key, down } = this.order;
      const head = this.heads.find((each) => each.dataset.sort === key);
      for (const each of this.heads) each.removeAttribute("aria-sort");
      head?.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = [...this.rows];
      if (head) {
        const compare = head.dataset.kind === "number"
          ? (a, b) => Number(a) - Number(b)
          : (a, b) => (a < b ? -1 : a > b ? 1 : 0);
        // Rows without a value come last in both orders.
        sorted.sort((a, b) => {
          const [x, y] = [a.dataset[key], b.dataset[key]];
          if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
          return down ? compare(y, x) : compare(x, y);
        });
      }
      this.body.append(...sorted);
    }

    mean() {
      const choice = this.choice;
      for (const line of this.querySelectorAll(".means tbody tr")) {
        const { backend } = line.dataset;
        const own = this.shown.filter((row) => row.dataset.backend === backend);
        const ratios = own.filter((row) => row.dataset.value).map((row) => Number(row.dataset.value));
        for (const cell of line.querySelectorAll("[data-figure]")) {
          const key = cell.dataset.figure;
          const source = `scoreboard#${backend}/${key}?${choice}`;
          if (key !== "geomean") {
            const count = own.filter((row) => key === "rows" || row.dataset.verdict === key).length;
            cell.replaceChildren(KT.shown(String(count), count, source));
          } else if (ratios.length) {
            const mean = Math.exp(ratios.reduce((sum, ratio) => sum + Math.log(ratio), 0) / ratios.length);
            cell.replaceChildren(KT.shown(`${KT.fixed(mean, 3)} ×`, mean, source));
          } else {
            cell.replaceChildren("–");
          }
        }
      }
    }

    csv() {
      const columns = ["op", "case", "dtype", "size", "backend", "step", "baseline", "value", "low", "high", "verdict", "stale"];
      const named = columns.map((key) => (key === "value" ? "ratio" : key));
      const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
      const lines = this.shown.map((row) => columns.map((key) => quoted(row.dataset[key] ?? "")));
      return [named, ...lines].map((line) => `${line.join(",")}\n`).join("");
    }

    async copy() {
      const text = this.csv();
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        // A page on disk may lack the clipboard; what is selected can be copied everywhere.
        const area = Object.assign(document.createElement("textarea"), { value: text });
        area.setAttribute("aria-label", "The rows as CSV");
        this.bar.append(area);
        area.select();
        const done = document.execCommand("copy");
        if (!done) {
          this.told.value = "The browser does not let pages copy: the rows stand selected beside the buttons";
          return;
        }
        area.remove();
      }
      this.told.value = `${this.shown.length} rows copied`;
    }
  },
);
