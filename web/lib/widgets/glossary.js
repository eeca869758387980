// A term's definition in a card beside it: by hovering or by focus; Escape closes it. The link works without.
"use strict";

customElements.define(
  "kt-glossary",
  class extends HTMLElement {
    connectedCallback() {
      this.card = document.createElement("div");
      this.card.id = "term-card";
      this.card.className = "card";
      this.card.setAttribute("role", "tooltip");
      this.card.hidden = true;
      this.append(this.card);
      for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, (event) => this.enter(event.target));
      document.addEventListener("mouseout", (event) => this.leave(event.relatedTarget));
      document.addEventListener("focusout", () => this.close());
      document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.close(); });
    }

    async enter(target) {
      const term = target.closest?.("a.term");
      if (term === this.term || this.card.contains(target)) clearTimeout(this.leaving);
      if (!term || term === this.term) return;
      this.close();
      this.term = term;
      const known = await KT.load("glossary");
      if (this.term === term) this.open(term, known[term.hash.slice(1)]);
    }

    open(term, [title, meaning]) {
      const strong = document.createElement("strong");
      strong.textContent = title;
      const text = document.createElement("p");
      text.textContent = meaning;
      this.card.replaceChildren(strong, text);
      this.card.hidden = false;
      term.setAttribute("aria-describedby", this.card.id);
      KT.place(this.card, term.getClientRects()[0]);
    }

    // The pointer may move into the card.
    leave(to) {
      if (to && (this.card.contains(to) || this.term?.contains(to))) return;
      clearTimeout(this.leaving);
      this.leaving = setTimeout(() => this.close(), 200);
    }

    close() {
      clearTimeout(this.leaving);
      this.term?.removeAttribute("aria-describedby");
      this.term = null;
      this.card.hidden = true;
    }
  },
);
