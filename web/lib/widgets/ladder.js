// A ladder as a slider: one step at a time, named by the address's hash.
"use strict";

customElements.define(
  "kt-ladder",
  class extends HTMLElement {
    connectedCallback() {
      this.rungs = [...this.querySelectorAll(".rung")];
      const bar = document.createElement("div");
      bar.className = "steps";
      const label = document.createElement("label");
      label.htmlFor = "step";
      label.textContent = "Step";
      this.slider = Object.assign(document.createElement("input"), {
        id: "step", type: "range", min: "0", max: String(this.rungs.length - 1), step: "1",
      });
      this.told = document.createElement("output");
      this.told.setAttribute("aria-live", "polite");
      bar.append(label, this.slider, this.told);
      this.prepend(bar);
      this.slider.addEventListener("input", () => {
        history.replaceState(null, "", `#${this.rungs[this.slider.valueAsNumber].id}`);
        this.show(this.slider.valueAsNumber);
      });
      addEventListener("hashchange", () => this.follow());
      this.follow();
    }

    follow() {
      const index = this.rungs.findIndex((rung) => `#${rung.id}` === location.hash);
      this.show(Math.max(index, 0));
    }

    show(index) {
      this.slider.value = String(index);
      this.rungs.forEach((rung, i) => { rung.hidden = i !== index; });
      const title = this.rungs[index].querySelector("h2").textContent;
      this.told.value = title;
      this.slider.setAttribute("aria-valuetext", title);
    }
  },
);
