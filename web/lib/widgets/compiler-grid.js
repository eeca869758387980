// The grid of compilations: one kernel's tiles at a time.
"use strict";

customElements.define(
  "kt-compile-grid",
  class extends HTMLElement {
    connectedCallback() {
      this.select = this.querySelector("select");
      this.querySelector(".filters").hidden = false;
      this.select.addEventListener("change", () => this.show());
      this.show();
    }

    show() {
      for (const grid of this.querySelectorAll(".grid")) grid.hidden = grid.dataset.kernel !== this.select.value;
    }
  },
);
