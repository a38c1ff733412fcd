// A conversation of several turns, streamed. It lives in this tab and is sent whole with each message.

import { KeyWanted, stream } from "./api.js";
import { byId, el } from "./dom.js";
import { count, seconds } from "./format.js";

const NAMES = { user: "You", assistant: "Model" };
const NEAR_END = 60;

export class Chat {
  constructor(model, wantKey) {
    this.model = model;
    this.wantKey = wantKey;
    this.messages = [];
    this.running = null;
    this.placeholder = byId("chat-log").firstElementChild;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    byId("chat-message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat-form").requestSubmit();
    });
  }

  offer(can) {
    byId("chat").hidden = !can;
    byId("chat-none").hidden = can;
  }

  async send() {
    const content = byId("chat-message").value.trim();
    if (this.running || !content) return;
    byId("chat-message").value = "";
    this.running = new AbortController();
    this.busy(true);
    const asked = this.add("user", content);
    const answer = this.add("assistant", "");
    this.say("Waiting for the first token.");
    try {
      this.say(await this.read(answer));
    } catch (error) {
      if (error instanceof KeyWanted) this.wantKey();
      const stopped = error.name === "AbortError";
      this.say(stopped ? "Stopped." : `It did not work: ${error.message || "the router asks for a key"}.`, !stopped);
    }
    if (!answer.message.content) this.takeBack(asked, answer);
    this.running = null;
    this.busy(false);
  }

  async read({ message, text }) {
    const began = performance.now();
    const body = {
      model: this.model(),
      messages: this.messages.slice(0, -1),
      max_tokens: byId("chat-tokens").valueAsNumber,
      temperature: byId("chat-temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    };
    const log = byId("chat-log");
    let usage = null;
    let finish = null;
    for await (const chunk of stream("/v1/chat/completions", body, this.running.signal)) {
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        if (choice.delta.content) {
          const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
          message.content += choice.delta.content;
          text.append(choice.delta.content);
          if (follows) log.scrollTop = log.scrollHeight;
          this.say("Generating.");
        }
        finish = choice.finish_reason ?? finish;
      }
    }
    const cut = finish === "length" ? " Cut at its limit of tokens." : "";
    const spent = seconds((performance.now() - began) / 1e3);
    const known = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const were = known ? ` (${count(known)} known from earlier turns)` : "";
    return `${count(usage.prompt_tokens)} tokens in${were}, ${count(usage.completion_tokens)} out in ${spent}.${cut}`;
  }

  // A turn with its text, which is text and never markup.
  add(role, content) {
    const message = { role, content };
    const text = el("div", { class: "said" }, content);
    const turn = el("div", { class: `turn ${role}` }, el("h3", {}, NAMES[role]), text);
    const log = byId("chat-log");
    this.placeholder.remove();
    log.append(turn);
    log.scrollTop = log.scrollHeight;
    this.messages.push(message);
    return { message, text, turn };
  }

  // Nothing was answered: the message goes back to where it can be sent again.
  takeBack(asked, answer) {
    this.messages.splice(-2);
    asked.turn.remove();
    answer.turn.remove();
    const box = byId("chat-message");
    box.value = box.value ? `${asked.message.content}\n${box.value}` : asked.message.content;
    if (!this.messages.length) byId("chat-log").replaceChildren(this.placeholder);
  }

  clear() {
    this.messages = [];
    byId("chat-log").replaceChildren(this.placeholder);
    this.say(" ");
    this.busy(false);
    byId("chat-message").focus();
  }

  say(text, wrong = false) {
    const status = byId("chat-status");
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle("wrong", wrong);
  }

  // While it is busy, the log does not read every piece aloud.
  busy(is) {
    byId("chat-log").setAttribute("aria-busy", String(is));
    byId("chat-send").disabled = is;
    byId("chat-stop").disabled = !is;
    byId("chat-clear").disabled = is || !this.messages.length;
  }
}
