// The survey's roofline: a chip is chosen, and roofs and floors move to its rates.
"use strict";

customElements.define(
  "kt-survey",
  class extends HTMLElement {
    connectedCallback() {
      this.svg = this.querySelector("svg");
      this.select = this.querySelector("select");
      this.scale = Object.fromEntries(Object.entries(this.svg.dataset).map(([key, value]) => [key, Number(value)]));
      this.querySelector(".controls").hidden = false;
      this.select.addEventListener("change", () => {
        history.replaceState(null, "", `#gpu=${this.select.value}`);
        this.show();
      });
      addEventListener("hashchange", () => this.follow());
      this.rates = this.chosen();
      this.follow();
    }

    follow() {
      const wanted = new URLSearchParams(location.hash.slice(1)).get("gpu");
      const option = [...this.select.options].find((each) => each.value === wanted);
      if (!option) return;
      this.select.value = wanted;
      this.show();
    }

    chosen() {
      const { memory, pipes } = this.select.selectedOptions[0].dataset;
      const rates = Object.entries(JSON.parse(pipes)).map(([name, [rate]]) => [name, rate]);
      return { memory: Number(memory), pipes: Object.fromEntries(rates) };
    }

    show() {
      const { told, text, pipes } = this.select.selectedOptions[0].dataset;
      const surveyed = this.select.selectedIndex === 0;
      this.querySelector("output").textContent = told;
      this.svg.setAttribute("aria-label", told);
      this.svg.querySelector(".memory-name tspan").textContent = text;
      for (const [name, [, rate]] of Object.entries(JSON.parse(pipes))) this.pipe(name).querySelector("tspan").textContent = rate;
      this.querySelector(".surveyed").hidden = !surveyed;
      this.querySelector(".promised").hidden = surveyed;
      this.svg.querySelector(".points").toggleAttribute("hidden", !surveyed);
      this.move(this.chosen());
    }

    pipe(name) {
      return [...this.svg.querySelectorAll(".pipe")].find((each) => each.dataset.pipe === name);
    }

    // Rates go from the old to the new ones as their logarithms do, which is the way that roofs move.
    move(to) {
      const from = this.rates, began = performance.now();
      const between = (was, now, share) => (was === undefined ? now : was * (now / was) ** share);
      const step = (time) => {
        const share = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1 : Math.min((time - began) / 300, 1);
        const pipes = Object.entries(to.pipes).map(([name, now]) => [name, between(from.pipes[name], now, share)]);
        this.rates = { memory: between(from.memory, to.memory, share), pipes: Object.fromEntries(pipes) };
        this.draw();
        if (share < 1) this.frame = requestAnimationFrame(step);
        else this.dataset.gpu = this.select.value;
      };
      cancelAnimationFrame(this.frame);
      delete this.dataset.gpu;
      step(began);
    }

    x(intensity) {
      return this.scale.left + this.scale.decadeAcross * (Math.log10(intensity) - this.scale.across);
    }

    y(rate) {
      return this.scale.bottom - this.scale.decadeUp * (Math.log10(rate) - this.scale.up);
    }

    draw() {
      const { memory, pipes } = this.rates, slope = memory / 1e3;
      const set = (element, values) => {
        for (const [key, value] of Object.entries(values)) element.setAttribute(key, value.toFixed(1));
      };
      const highest = Math.max(...Object.values(pipes)), first = 10 ** this.scale.across;
      const end = { x2: this.x(highest / slope), y2: this.y(highest) };
      set(this.svg.querySelector(".memory"), { x1: this.x(first), y1: this.y(first * slope), ...end });
      set(this.svg.querySelector(".memory-name"), { x: end.x2 - 24, y: end.y2 + 14 });
      const above = (rate) => Math.min(...Object.values(pipes).filter((each) => each > rate));
      for (const group of this.svg.querySelectorAll(".pipe")) {
        const rate = pipes[group.dataset.pipe];
        group.toggleAttribute("hidden", rate === undefined);
        if (rate === undefined) continue;
        set(group.querySelector("line"), { x1: this.x(rate / slope), y1: this.y(rate), y2: this.y(rate) });
        set(group.querySelector("text"), { y: this.y(rate) + (this.y(rate) - this.y(above(rate)) < 24 ? 18 : -9) });
      }
      for (const floor of this.svg.querySelectorAll(".floor")) {
        const rate = pipes[floor.dataset.pipe];
        floor.toggleAttribute("hidden", rate === undefined);
        if (rate !== undefined) set(floor, { cy: this.y(Math.min(rate, slope * floor.dataset.intensity)) });
      }
      const names = this.svg.querySelector(".names");
      names.setAttribute("transform", `translate(0 ${(this.y(memory) - this.y(names.dataset.memory)).toFixed(1)})`);
    }
  },
);
