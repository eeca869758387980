// A ladder as a slider: one step at a time, named by the address's hash.
"use strict";

customElements.define(
  "kt-ladder",
  class extends HTMLElement {
    connectedCallback() {
      this.rungs = [...this.querySelectorAll(".rung")];
      this.prepend(this.bar());
      // Arrows move the slider often: they replace the entry of history that a button adds.
      this.slider.addEventListener("input", () => this.go(this.slider.valueAsNumber, "replaceState"));
      addEventListener("popstate", () => this.follow());
      addEventListener("hashchange", () => this.follow());
      this.show(0);
      this.follow();
    }

    bar() {
      const bar = document.createElement("div");
      bar.className = "steps";
      const label = document.createElement("label");
      label.htmlFor = "step";
      label.textContent = "Step";
      this.slider = Object.assign(document.createElement("input"), {
        id: "step", type: "range", min: "0", max: String(this.rungs.length - 1), step: "1",
      });
      this.told = document.createElement("output");
      this.told.htmlFor = "step";
      this.before = this.button("←", "Previous step", -1);
      this.after = this.button("→", "Next step", 1);
      bar.append(label, this.before, this.slider, this.after, this.told);
      return bar;
    }

    button(sign, name, by) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: sign });
      button.setAttribute("aria-label", name);
      button.addEventListener("click", () => this.go(this.index + by, "pushState"));
      return button;
    }

    go(index, how) {
      history[how](null, "", `#${this.rungs[index].id}`);
      this.show(index);
    }

    // To the step that the address names, or that holds what it names; without a name, to the first.
    follow() {
      const id = decodeURIComponent(location.hash.slice(1));
      const target = id && document.getElementById(id);
      const rung = target && target.closest(".rung");
      if (id && !rung) return;
      const index = Math.max(this.rungs.indexOf(rung), 0);
      if (index === this.index) return;
      this.show(index);
      if (target && target !== rung) target.scrollIntoView();
    }

    show(index) {
      this.index = index;
      this.slider.value = String(index);
      this.rungs.forEach((rung, i) => { rung.hidden = i !== index; });
      const title = this.rungs[index].querySelector("h2").textContent;
      this.told.value = title;
      this.slider.setAttribute("aria-valuetext", title);
      this.before.disabled = index === 0;
      this.after.disabled = index === this.rungs.length - 1;
      this.dispatchEvent(new CustomEvent("kt-step", { bubbles: true, detail: this.rungs[index] }));
    }
  },
);
