// The roofline beside the step that is shown: its points are solid, and each memory's roof can be switched off.
"use strict";

customElements.define(
  "kt-roofline",
  class extends HTMLElement {
    connectedCallback() {
      if (this.svg) return; // moved, not made
      this.svg = this.querySelector("svg");
      this.steps = [...document.querySelectorAll("svg .step")];
      const switches = document.createElement("div");
      switches.className = "switches";
      switches.append(this.checkbox("DRAM", true, (on) => this.svg.classList.toggle("without-dram", !on)));
      switches.append(this.checkbox("L2", false, (on) => this.svg.classList.toggle("with-l2", on)));
      this.querySelector("figcaption").append(switches);
      document.addEventListener("kt-step", (event) => this.show(event.detail));
    }

    checkbox(name, checked, apply) {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked });
      box.addEventListener("change", () => apply(box.checked));
      label.append(box, ` ${name}: roof and bytes`);
      return label;
    }

    show(rung) {
      rung.querySelector(".seen").append(this);
      this.svg.classList.add("stepped");
      for (const step of this.steps) {
        const on = step.dataset.step === rung.id;
        step.classList.toggle("on", on);
        if (on && this.svg.contains(step)) step.parentNode.append(step); // above the others
      }
    }
  },
);
