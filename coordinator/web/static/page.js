// The page: takes frames, and lets each drawing redraw only what changed.

import { byId, el, number, percent, seconds, setAttribute, setText } from "./dom.js";
import { Connection } from "./connection.js";
import { drawCurves, recolourCurves, resizeCurves } from "./curves.js";
import { drawGantt } from "./gantt.js";
import { drawNodes } from "./nodes.js";
import { drawRing } from "./ring.js";
import { Store } from "./store.js";
import { drawWhatIf } from "./whatif.js";

const TILES = ["progress", "loss", "accuracy", "depth", "pace", "initiator"];
const tiles = new Map(TILES.map((name) => {
  const parts = { value: el("b"), text: el("span") };
  parts.box = el("div", { class: "tile", id: `tile-${name}` }, parts.text, parts.value);
  byId("tiles").append(parts.box);
  return [name, parts];
}));
const meter = el("div", { class: "meter", role: "progressbar", "aria-label": "steps done", "aria-valuemin": 0, "aria-valuemax": 100 }, el("i"));
tiles.get("progress").box.append(meter);

function tile(name, text, value) {
  const parts = tiles.get(name);
  setText(parts.text, text);
  setText(parts.value, value);
  setAttribute(parts.value, "class", value.length > 11 ? "long" : "");
}

function drawHead(state) {
  const run = state.run;
  const last = run.last ?? {};
  const model = [run.model, state.plan.method, run.task].filter(Boolean).join(" · ");
  setText(byId("run-name"), run.id ? `${run.id}${model ? ` — ${model}` : ""}` : "no run yet");
  setText(byId("phase"), run.phase ?? "connecting");
  setAttribute(byId("phase"), "class", `badge ${["training", "done", "failed"].includes(run.phase) ? run.phase : ""}`);
  document.title = run.id ? `${run.phase === "training" ? `${last.step ?? 0}/${run.num_steps ?? "?"}` : run.phase} · RingTune` : "RingTune";
  const done = last.step ?? 0;
  const share = run.num_steps ? done / run.num_steps : 0;
  tile("progress", last.round ? `step, round ${last.round}` : "step", `${done} / ${run.num_steps ?? "–"}`);
  meter.firstChild.style.width = percent(share).replace(" ", "");
  setAttribute(meter, "aria-valuenow", Math.round(100 * share));
  tile("loss", "loss of the newest step", number(last.loss));
  const evaluation = run.evaluation;
  const judged = `${evaluation?.is_result ? "result" : "evaluated"} at ${evaluation?.step}`;
  if (evaluation && typeof evaluation.accuracy === "number") tile("accuracy", `accuracy, ${judged}`, percentOne(evaluation.accuracy));
  else if (evaluation && typeof evaluation.mae === "number") tile("accuracy", `mean absolute error, ${judged}`, number(evaluation.mae));
  else tile("accuracy", "accuracy of the newest step", typeof last.accuracy === "number" ? percentOne(last.accuracy) : "–");
  tile("depth", last.trains ? "trains" : "blocks that train", last.trains || (last.depth !== undefined ? `${last.depth} of ${state.plan.num_blocks ?? "?"}` : "–"));
  tile("pace", run.wall_s ? "whole run took" : "newest step took", seconds(run.wall_s || last.seconds));
  tile("initiator", run.is_over ? "last initiator" : run.doing ? `initiator, ${run.doing}` : "initiator", last.initiator ?? "–");
  if (run.message) problem(run.message);
}

const percentOne = (share) => `${(100 * share).toFixed(1)} %`;

let shownEvents = 0;
let lastEvent = "";

function drawEvents(state) {
  const list = byId("events");
  const newest = JSON.stringify(state.events.at(-1) ?? null);
  if (newest === lastEvent && state.events.length === shownEvents) return;
  // lines are added at the top; of a log that is shown already only those that are new
  const known = state.events.findLastIndex((event) => JSON.stringify(event) === lastEvent);
  const fresh = known >= 0 ? state.events.slice(known + 1) : state.events;
  if (known < 0) list.replaceChildren();
  for (const [kind, text, at] of fresh) {
    const time = at ? new Date(at * 1000).toLocaleTimeString([], { hour12: false }) : "";
    list.prepend(el("li", { class: kind }, el("time", {}, time), el("span", {}, text)));
  }
  while (list.children.length > 200) list.lastChild.remove();
  shownEvents = state.events.length;
  lastEvent = newest;
}

const DRAWN_BY = [
  [drawHead, ["run", "plan"]],
  [drawRing, ["plan", "nodes", "links", "trains", "members", "run"]],
  [drawCurves, ["curves", "marks", "plan", "run"]],
  [drawGantt, ["gantt", "plan"]],
  [drawNodes, ["plan", "nodes", "members", "trains", "run"]],
  [drawWhatIf, ["plan", "links"]],
  [drawEvents, ["events"]],
];

const timings = []; // how long the newest redraws took, for those who want to know

const store = new Store((state, changed) => {
  const began = performance.now();
  for (const [draw, names] of DRAWN_BY) if (names.some((name) => changed.has(name))) draw(state);
  timings.push(performance.now() - began);
  if (timings.length > 600) timings.shift();
  if (changed.has("skipped")) behind();
});

function problem(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

let calm = 0;

function behind() {
  setText(byId("status"), `this browser fell behind: ${store.skipped} updates were skipped, what you see is the newest state`);
  clearTimeout(calm);
  calm = setTimeout(() => setText(byId("status"), "live"), 8000);
}

const connection = new Connection({
  onFrame: (frame) => store.take(frame),
  onStatus: (text) => setText(byId("status"), text),
  onProblem: problem,
  onToken: (text) => {
    problem(text);
    byId("token-form").hidden = false;
    byId("token").focus();
  },
});

byId("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await connection.login(byId("token").value.trim())) {
    byId("token").value = "";
    byId("token-form").hidden = true;
    problem("");
    await connection.open();
  }
});

new ResizeObserver(() => {
  resizeCurves();
  store.all();
}).observe(byId("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  recolourCurves();
  store.all();
});

window.ringtune = { store, timings };
window.addEventListener("load", () => connection.open());
