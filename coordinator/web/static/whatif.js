// The what-if panel: sliders for a node's speed, a link's rate and the micro-batches; the server asks the simulator.

import { byId, el, seconds, setAttribute, setText } from "./dom.js";
import { problemOf } from "./connection.js";

const FACTORS = [0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8];
const WAIT_MS = 350;
const node = byId("wi-node");
const link = byId("wi-link");
const speed = byId("wi-speed");
const rate = byId("wi-rate");
const micro = byId("wi-micro");

let choices = [1];
let shape = "";
let now = 0;
const chosen = { speeds: {}, rates: {} };
let timer = 0;
let asking = null;

export function drawWhatIf(state) {
  const nodes = (state.plan.nodes ?? []).map((one) => one.node);
  const links = state.links.filter((one) => one[4]).map(([source, target]) => `${source}>${target}`);
  const wanted = JSON.stringify([nodes, links, state.plan.batch_size, state.plan.microbatches]);
  if (wanted === shape) return;
  shape = wanted;
  refill(node, nodes);
  refill(link, links.length ? links : ["no link was measured"]);
  rate.disabled = link.disabled = !links.length;
  const size = state.plan.batch_size ?? 1;
  choices = [];
  for (let count = 1; count <= Math.min(size, 256); count += 1) if (size % count === 0) choices.push(count);
  now = state.plan.microbatches ?? 1;
  setAttribute(micro, "max", choices.length - 1);
  micro.value = String(Math.max(0, choices.indexOf(now)));
  label();
}

function refill(select, names) {
  const had = select.value;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name.replace(">", " → "))));
  if (names.includes(had)) select.value = had;
}

const factorOf = (slider) => FACTORS[Number(slider.value) + 4];
const factorText = (factor) => (factor === 1 ? "as it is" : factor > 1 ? `${factor} times as fast` : `${Math.round(100 * factor)} % of it`);

function label() {
  const texts = [[speed, factorText(factorOf(speed)), "wi-speed-out"], [rate, factorText(factorOf(rate)), "wi-rate-out"]];
  const count = choices[Number(micro.value)] ?? now;
  texts.push([micro, count === now ? `as they are: ${now}` : `${count} in place of ${now}`, "wi-micro-out"]);
  for (const [slider, text, out] of texts) {
    setText(byId(out), text);
    setAttribute(slider, "aria-valuetext", text);
  }
}

function note() {
  const put = (into, name, factor) => {
    if (factor === 1) delete into[name];
    else into[name] = factor;
  };
  put(chosen.speeds, node.value, factorOf(speed));
  if (!rate.disabled) put(chosen.rates, link.value, factorOf(rate));
  label();
  clearTimeout(timer);
  timer = setTimeout(ask, WAIT_MS);
}

async function ask() {
  asking?.abort();
  asking = new AbortController();
  const count = choices[Number(micro.value)] ?? now;
  setText(byId("wi-text"), "asking the simulator …");
  try {
    const answer = await fetch("/api/what-if", {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ speeds: chosen.speeds, rates: chosen.rates, microbatches: count === now ? 0 : count }),
      signal: asking.signal,
    });
    if (!answer.ok) return setText(byId("wi-text"), await problemOf(answer));
    show(await answer.json());
  } catch (error) {
    if (error.name !== "AbortError") setText(byId("wi-text"), "the page's process does not answer");
  }
}

function changes() {
  const words = Object.entries(chosen.speeds).map(([name, factor]) => `${name} ${factorText(factor)}`);
  words.push(...Object.entries(chosen.rates).map(([name, factor]) => `link ${name.replace(">", " → ")} ${factorText(factor)}`));
  const count = choices[Number(micro.value)] ?? now;
  if (count !== now) words.push(`${count} micro-batches`);
  return words.join(", ");
}

function show(found) {
  if (found.error) {
    byId("wi-bars").replaceChildren();
    return setText(byId("wi-text"), found.error);
  }
  const what = changes();
  const saved = found.before_s ? 1 - found.after_s / found.before_s : 0;
  const words = Math.abs(saved) < 0.005 ? "as long" : `${Math.round(100 * Math.abs(saved))} % ${saved > 0 ? "shorter" : "longer"}`;
  setText(byId("wi-text"), what ? `With ${what}: ${words}.` : "Nothing is changed: this is how well the simulator knows the run.");
  const rows = [["measured", "measured", found.measured_s], ["before", "predicted", found.before_s], ["after", "predicted, changed", what ? found.after_s : null]];
  const parts = group(`The first ${found.steps} steps`, rows);
  if (found.whole_before_s) parts.push(...group("The whole run", [["before", "predicted", found.whole_before_s], ["after", "predicted, changed", what ? found.whole_after_s : null]]));
  byId("wi-bars").replaceChildren(...parts);
}

function group(title, rows) {
  const most = Math.max(...rows.map((row) => row[2] ?? 0)) || 1;
  const parts = [el("h3", {}, title)];
  for (const [kind, name, value] of rows) {
    if (value === null || value === undefined) continue;
    const fill = el("i");
    fill.style.width = `${(100 * value) / most}%`;
    parts.push(el("div", { class: `row ${kind}` }, el("span", {}, name), el("span", { class: "track", "aria-hidden": "true" }, fill), el("span", {}, seconds(value))));
  }
  return parts;
}

node.addEventListener("change", () => {
  speed.value = String(FACTORS.indexOf(chosen.speeds[node.value] ?? 1) - 4);
  label();
});
link.addEventListener("change", () => {
  rate.value = String(FACTORS.indexOf(chosen.rates[link.value] ?? 1) - 4);
  label();
});
for (const slider of [speed, rate, micro]) slider.addEventListener("input", note);
byId("wi-ask").addEventListener("click", ask);
byId("wi-reset").addEventListener("click", () => {
  chosen.speeds = {};
  chosen.rates = {};
  speed.value = rate.value = "0";
  micro.value = String(Math.max(0, choices.indexOf(now)));
  label();
  ask();
});
byId("what-if").addEventListener("submit", (event) => event.preventDefault());
