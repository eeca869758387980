// Predict first: which way each quantity goes, before the page says so; and the score of reader and author.
"use strict";

(() => {
  const WAYS = [["up", "up"], ["same", "about the same"], ["down", "down"]];
  const PLACE = "kt-predict";

  // What was answered, by step and question. A browser may refuse storage: then it lasts as long as the page.
  const state = { answers: {}, skipped: false, ...read() };

  function read() {
    try {
      return JSON.parse(localStorage.getItem(PLACE)) ?? {};
    } catch {
      return {};
    }
  }

  function keep() {
    try {
      localStorage.setItem(PLACE, JSON.stringify(state));
    } catch {
      // Nothing depends on it.
    }
  }

  function score() {
    const judged = Object.values(state.answers).filter((each) => each.went && each.author !== "open");
    const open = Object.keys(state.answers).length - judged.length;
    const you = judged.filter((each) => each.you === each.went).length;
    const author = judged.filter((each) => each.author === "hit").length;
    if (!judged.length && !open) return "";
    const rest = open ? `; ${open} open` : "";
    return `You ${you} of ${judged.length}, the author ${author} of ${judged.length}${rest}.`;
  }

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  customElements.define(
    "kt-predict",
    class extends HTMLElement {
      connectedCallback() {
        this.verdicts = this.querySelector(".verdicts");
        this.outcome = this.querySelector(".outcome");
        this.asked = [...this.querySelectorAll(".question[data-playable]")];
        if (!this.asked.length) return;
        this.form = this.ask();
        this.score = element("output", { className: "score" });
        this.after = element("div", { className: "buttons" }, this.button("Start over", () => this.forget()));
        const rules = document.getElementById("predict-rules").content.cloneNode(true);
        this.told = element("div", {}, this.score, rules, this.after);
        this.verdicts.before(this.form);
        this.verdicts.after(this.told);
        document.addEventListener("kt-predict", () => this.update());
        this.update();
      }

      id(question) {
        return `${this.dataset.step}/${question.dataset.key}`;
      }

      ask() {
        const columns = new Map();
        for (const question of this.asked) {
          const language = question.dataset.language;
          if (!columns.has(language)) columns.set(language, element("div", { className: "twin" }, element("h4", { textContent: language })));
          columns.get(language).append(this.fieldset(question));
        }
        const form = element(
          "form",
          { className: "ask" },
          element("p", { className: "why", textContent: "Which way does each quantity go from the step before? The author predicted them, too." }),
          element("div", { className: "twins" }, ...columns.values()),
          element(
            "div",
            { className: "buttons" },
            element("button", { type: "submit", textContent: "Show what came" }),
            this.button("Skip", () => this.reveal()),
            this.button("Skip all", () => this.skip()),
          ),
        );
        form.addEventListener("submit", (event) => {
          event.preventDefault();
          this.answer(new FormData(form));
        });
        return form;
      }

      fieldset(question) {
        const name = this.id(question);
        const labels = WAYS.map(([value, told]) =>
          element("label", {}, element("input", { type: "radio", name, value }), ` ${told}`));
        return element("fieldset", {}, element("legend", { textContent: question.dataset.asked }), ...labels);
      }

      button(textContent, press) {
        const button = element("button", { type: "button", textContent });
        button.addEventListener("click", press);
        return button;
      }

      answer(given) {
        for (const question of this.asked) {
          const you = given.get(this.id(question));
          const { went, author } = question.dataset;
          if (you) state.answers[this.id(question)] = { you, went, author };
        }
        this.reveal();
      }

      skip() {
        state.skipped = true;
        this.reveal();
      }

      reveal() {
        this.shown = true;
        this.changed();
        this.querySelector(".predictions h3").focus();
      }

      forget() {
        state.answers = {};
        state.skipped = false;
        for (const each of document.querySelectorAll("kt-predict")) each.shown = false;
        for (const form of document.querySelectorAll("form.ask")) form.reset();
        this.changed();
      }

      changed() {
        keep();
        document.dispatchEvent(new Event("kt-predict"));
      }

      update() {
        const answers = this.asked.map((question) => state.answers[this.id(question)]);
        const open = this.shown || state.skipped || answers.some(Boolean);
        this.form.hidden = open;
        for (const part of [this.verdicts, this.outcome, this.told]) part.hidden = !open;
        this.score.value = score();
        this.asked.forEach((question, index) => this.mark(question, answers[index]));
      }

      // The reader's answer, at the head of what came.
      mark(question, answer) {
        question.querySelector(".answer")?.remove();
        if (!answer) return;
        const { went } = question.dataset;
        const [kind, verdict] = !went ? ["", "open"] : answer.you === went ? ["right", "right"] : ["wrong", "wrong"];
        const you = WAYS.find(([value]) => value === answer.you)[1];
        question.prepend(element("span", { className: `answer ${kind}`, textContent: `You said ${you}: ${verdict}. ` }));
      }
    },
  );
})();
