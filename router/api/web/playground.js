// A completion, streamed, and where its time went.

import { KeyWanted, stream } from "./api.js";
import { byId, el } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { bar, legend } from "./stages.js";

export class Playground {
  constructor(model, wantKey) {
    this.model = model;
    this.wantKey = wantKey;
    this.running = null;
    byId("playground").addEventListener("submit", (event) => {
      event.preventDefault();
      this.complete();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("playground").requestSubmit();
    });
  }

  async complete() {
    if (this.running) return;
    this.running = new AbortController();
    this.busy(true);
    const prompt = byId("prompt").value;
    const text = el("span");
    const answer = byId("answer");
    answer.replaceChildren(el("span", { class: "asked" }, prompt), text);
    byId("playground-bar").replaceChildren();
    this.say("Waiting for the first token.");
    const began = performance.now();
    try {
      await this.read(prompt, text, answer, began);
    } catch (error) {
      if (error instanceof KeyWanted) this.wantKey();
      const stopped = error.name === "AbortError";
      this.say(stopped ? "Stopped." : `It did not work: ${error.message || "the router asks for a key"}.`, !stopped);
    }
    this.running = null;
    this.busy(false);
  }

  async read(prompt, text, answer, began) {
    const body = {
      model: this.model(),
      prompt,
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
      return_stages: true,
    };
    let first = null;
    let closing = null;
    for await (const chunk of stream("/v1/completions", body, this.running.signal)) {
      for (const choice of chunk.choices) {
        if (first === null) {
          first = (performance.now() - began) / 1e3;
          this.say("Generating.");
        }
        const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 60;
        text.append(choice.text);
        if (atEnd) answer.scrollTop = answer.scrollHeight;
      }
      if (chunk.hackkv) closing = chunk;
    }
    this.report(closing, first, (performance.now() - began) / 1e3);
  }

  report({ usage, hackkv }, first, total) {
    const rate = usage.completion_tokens / total;
    const kv = hackkv.kv.ratio === null ? "" : ` KV moved: ${percent(hackkv.kv.ratio)} of FP16.`;
    this.say(
      `${count(usage.prompt_tokens)} tokens in, ${count(usage.completion_tokens)} out in ${seconds(total)}; ` +
        `first token after ${seconds(first)}, ${rate.toFixed(1)} tokens / s.${kv}`,
    );
    byId("playground-bar").replaceChildren(bar(hackkv, hackkv.total_s), legend(hackkv));
  }

  say(text, wrong = false) {
    const status = byId("playground-status");
    status.textContent = text;
    status.classList.toggle("wrong", wrong);
  }

  busy(is) {
    byId("run").disabled = is;
    byId("stop").disabled = !is;
  }
}
