// Asks the router once a second and shows its answers. Waits, errors and recovery of these requests are handled here.

import { KeyWanted, getJson, hasKey, setKey } from "./api.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, el, setText } from "./dom.js";
import { bytes, compact, count, percent, seconds } from "./format.js";
import { History } from "./history.js";
import { showNodes } from "./nodes.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { STAGES, swatch } from "./stages.js";
import { Tabs } from "./tabs.js";

const PERIOD_MS = 1000;

const history = new History();
const requests = new Requests();
const charts = new Charts();
let cluster = null;
let failedSince = null;

new Playground(() => cluster?.model, askForKey);
new Tabs(["complete", "chat"]);
const chat = new Chat(() => cluster?.model, askForKey);
byId("key-button").addEventListener("click", askForKey);
byId("key-form").addEventListener("submit", () => {
  setKey(byId("key").value.trim());
  byId("key").value = "";
});
document.addEventListener("visibilitychange", () => document.hidden || tick());

let busy = false;
async function tick() {
  if (busy || document.hidden) return;
  busy = true;
  try {
    await load();
    failedSince = null;
    alarm("");
  } catch (error) {
    if (error instanceof KeyWanted) refused();
    else failed();
  }
  busy = false;
}

async function load() {
  let fresh = await getJson(`/api/cluster?after=${history.last?.seq ?? 0}`);
  if (cluster && cluster.started !== fresh.started) {
    history.forget(); // the router was restarted: its numbers begin again
    requests.forget();
    fresh = await getJson("/api/cluster");
  }
  const news = await getJson(`/api/requests?after=${requests.after}`);
  cluster = fresh;
  history.add(cluster.samples);
  requests.add(news);
  show();
}

function show() {
  showHeader();
  showNodes(cluster);
  chat.offer(cluster.chat);
  if (!history.last) return;
  showFigures();
  showLegend();
  showKv();
  showFound();
  charts.show(history);
}

function showHeader() {
  const { model, codec, version, max_context, missing, nodes } = cluster;
  const context = max_context ? `, ${count(max_context)} tokens of context` : "";
  setText("identity", `${model}, codec ${codec}${context}, version ${version}`);
  byId("key-button").hidden = !hasKey();
  if (missing.length) state("bad", `not ready: no ${missing.join(" and no ")} node`);
  else if (nodes.some((node) => node.suspended)) state("warn", "ready, a node is held back");
  else state("ok", "ready");
  setText("curl", curl(model));
}

function curl(model) {
  const auth = hasKey() ? ' -H "Authorization: Bearer $KEY"' : "";
  const body = JSON.stringify({ model, prompt: "def ", max_tokens: 32, stream: true });
  return `curl -N ${location.origin}/v1/completions${auth} -H 'Content-Type: application/json' -d '${body}'`;
}

function showFigures() {
  const { live, waiting } = cluster;
  const last = history.last;
  const recent = history.recent;
  const minute = history.since(60);
  setText("now-live", count(live));
  setText("now-waiting", waiting ? `${count(waiting)} in line for a decode node` : "none in line");
  setText("now-output", recent ? compact(recent.output_tokens / recent.span_s) : "–");
  setText("now-prompt", recent ? `${compact(recent.prompt_tokens / recent.span_s)} prompt tokens / s` : " ");
  setText("now-jct", minute?.finished ? seconds(minute.total_s / minute.finished) : "–");
  const first = requests.firstToken();
  setText("now-ttft", first ? seconds(first.mean) : "–");
  setText("now-ttft-99", first ? `mean; p99 ${seconds(first.p99)}` : "mean of the last minute");
  setText("now-ratio", last.fp16_bytes ? percent(last.kv_bytes / last.fp16_bytes) : "–");
  const saved = last.fp16_bytes - last.kv_bytes;
  setText("now-kv", last.fp16_bytes ? `${bytes(Math.abs(saved))} ${saved < 0 ? "more sent" : "not sent"}` : "nothing moved yet");
  setText("now-finished", compact(last.finished));
  setText("now-failed", last.failed ? `${compact(last.failed)} did not finish` : "all finished");
}

const legend = STAGES.map(([stage, meaning]) => {
  const [mean, share] = [el("td", {}, "–"), el("td", {}, "–")];
  byId("jct-legend").append(el("tr", { title: meaning }, el("td", {}, swatch(stage), stage), mean, share));
  return { stage, mean, share };
});
const sum = { mean: el("td", {}, "–"), share: el("td", {}, "") };
byId("jct-legend").append(el("tr", { class: "total" }, el("td", {}, "total"), sum.mean, sum.share));

function showLegend() {
  const whole = history.whole;
  const some = whole?.finished > 0;
  for (const { stage, mean, share } of legend) {
    mean.textContent = some ? seconds(whole.stages[stage] / whole.finished) : "–";
    share.textContent = some ? percent(whole.stages[stage] / whole.total_s) : "–";
  }
  sum.mean.textContent = some ? seconds(whole.total_s / whole.finished) : "–";
  sum.share.textContent = some ? `of ${compact(whole.finished)}` : "";
}

const makeTrack = (id, kind) => {
  const [name, fill, size] = [el("span"), el("span", { class: kind }), el("span", { class: "size" }, "–")];
  byId(id).append(name, el("div", { class: "track" }, fill), size);
  return { name, fill, size };
};
const tracks = ["ours", ""].map((kind) => makeTrack("kv", kind));
const found = ["ours", "ours", "ours"].map((kind) => makeTrack("found", kind));

function showKv() {
  const { kv_bytes, fp16_bytes } = history.last;
  const largest = Math.max(kv_bytes, fp16_bytes, 1);
  [[`as ${cluster.codec}`, kv_bytes], ["as FP16", fp16_bytes]].forEach(([name, size], index) => {
    tracks[index].name.textContent = name;
    tracks[index].fill.style.width = `${(100 * size) / largest}%`;
    tracks[index].size.textContent = size ? bytes(size) : "–";
  });
  const lossy = cluster.nodes.find((node) => node.codec_loss);
  const open = `The last page of a prompt travels as FP16 until its ${lossy?.page_tokens} tokens are full.`;
  const ratio = fp16_bytes ? `${percent(kv_bytes / fp16_bytes)} since the router started, headers included.` : "Nothing moved yet.";
  setText("kv-note", lossy ? `${ratio} ${open}` : ratio);
}

// Pages that nodes keep after a request: what a prefill node need not compute again, and a decode node need not get again.
// What a prefill node lacks may come from a decode node.
function showFound() {
  const { prompt_tokens, cached_tokens, fetched_tokens, held_tokens } = history.last;
  const shown = [["not computed", cached_tokens], ["… but fetched", fetched_tokens], ["not sent", held_tokens]];
  shown.forEach(([name, tokens], index) => {
    const share = prompt_tokens ? tokens / prompt_tokens : 0;
    found[index].name.textContent = name;
    found[index].fill.style.width = `${100 * share}%`;
    found[index].size.textContent = prompt_tokens ? percent(share) : "–";
  });
  setText("found-note", prompt_tokens ? `Of ${compact(prompt_tokens)} prompt tokens since the router started.` : "No prompts yet.");
}

function state(kind, text) {
  byId("state").className = kind;
  setText("state-text", text);
}

// Screen readers announce an alarm once. How long it lasts is only shown.
function alarm(text, lasting = "") {
  byId("banner").hidden = text === "";
  setText("banner-text", text);
  setText("banner-time", lasting);
  document.documentElement.toggleAttribute("data-stale", text !== "");
}

function failed() {
  failedSince ??= Date.now();
  const silent = (Date.now() - failedSince) / 1e3;
  state("bad", "no answer");
  const shown = cluster ? " What you see is from before." : "";
  alarm(`The router does not answer. Trying again.${shown}`, `${silent.toFixed(0)} s`);
}

function refused() {
  state("warn", "a key is needed");
  byId("key-button").hidden = false;
  if (!hasKey()) askForKey();
  else alarm("The router does not accept this API key.");
}

function askForKey() {
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

setInterval(tick, PERIOD_MS);
tick();
