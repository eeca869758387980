// One ladder in short: a slider below its bars, which moves the step, its twin code, and its marks on the roofline.
"use strict";

customElements.define(
  "kt-hero",
  class extends HTMLElement {
    connectedCallback() {
      this.rungs = [...this.querySelectorAll(".rung")];
      this.columns = [...this.querySelectorAll(".column")];
      this.querySelector("details.all").open = false;
      const bar = document.createElement("div");
      bar.className = "slide";
      bar.style.setProperty("--steps", String(this.rungs.length));
      const label = document.createElement("label");
      label.htmlFor = "hero-step";
      label.textContent = "Step";
      this.slider = Object.assign(document.createElement("input"), {
        id: "hero-step", type: "range", min: "0", max: String(this.rungs.length - 1), step: "1",
      });
      this.slider.addEventListener("input", () => this.choose(this.slider.valueAsNumber));
      bar.append(this.slider, label);
      this.querySelector(".bars").after(bar);
      this.columns.forEach((column, index) => column.addEventListener("click", () => this.choose(index)));
      addEventListener("hashchange", () => this.follow());
      this.follow();
    }

    choose(index) {
      history.replaceState(null, "", `#${this.rungs[index].id}`);
      this.show(index);
    }

    follow() {
      const index = this.rungs.findIndex((rung) => `#${rung.id}` === location.hash);
      this.show(index < 0 ? this.rungs.length - 1 : index);
    }

    show(index) {
      const rung = this.rungs[index];
      this.slider.value = String(index);
      this.slider.setAttribute("aria-valuetext", rung.querySelector("h3").textContent);
      this.rungs.forEach((each, i) => { each.hidden = i !== index; });
      this.columns.forEach((each, i) => each.classList.toggle("now", i === index));
      this.querySelector(".whole a").hash = rung.id;
      for (const backend of ["cuda", "triton"]) {
        const mark = this.querySelector(`.now.${backend}`);
        const dot = this.querySelector(`.dot.${backend}[data-step="${rung.dataset[backend]}"]`);
        if (mark && dot) mark.style.transform = `translate(${dot.getAttribute("cx")}px,${dot.getAttribute("cy")}px)`;
      }
    }
  },
);
