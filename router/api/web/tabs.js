// Tabs as the ARIA patterns have them: one tab stop, arrow keys choose. NAME-tab shows NAME-panel.

import { byId } from "./dom.js";

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

export class Tabs {
  constructor(names) {
    this.names = names;
    for (const [index, name] of names.entries()) {
      const tab = byId(`${name}-tab`);
      tab.addEventListener("click", () => this.choose(name));
      tab.addEventListener("keydown", (event) => {
        if (event.key in STEPS) this.choose(names.at((index + STEPS[event.key]) % names.length), true);
      });
    }
  }

  choose(chosen, focus = false) {
    for (const name of this.names) {
      const tab = byId(`${name}-tab`);
      tab.setAttribute("aria-selected", String(name === chosen));
      tab.tabIndex = name === chosen ? 0 : -1;
      byId(`${name}-panel`).hidden = name !== chosen;
    }
    if (focus) byId(`${chosen}-tab`).focus();
  }
}
