// The nodes as a table: state, blocks, shares of the time, memory against the budget. A row is made once and then kept.

import { byId, bytes, el, percent, setAttribute, setText, units } from "./dom.js";
import { initiatorOf, isLost } from "./ring.js";

const body = byId("nodes").tBodies[0];
const rows = new Map();

function makeRow(node) {
  const stack = el("span", { class: "stack", "aria-hidden": "true" }, el("i", { class: "busy" }), el("i", { class: "waiting" }), el("i", { class: "idle" }));
  const bar = el("span", { class: "bar", "aria-hidden": "true" }, el("i", { class: "fill" }), el("i", { class: "mark" }));
  const cells = { state: el("td", { class: "state" }), blocks: el("td"), shares: el("span", { class: "text" }), memory: el("span", { class: "text" }) };
  const row = el("tr", {}, el("th", { scope: "row" }, node), cells.state, cells.blocks, el("td", {}, stack, cells.shares), el("td", {}, bar, cells.memory));
  return { row, stack, bar, cells };
}

export function drawNodes(state) {
  const planned = new Map((state.plan.nodes ?? []).map((one) => [one.node, one]));
  const names = [...planned.keys(), ...Object.keys(state.members).filter((node) => !planned.has(node))];
  for (const node of rows.keys()) {
    if (!names.includes(node)) {
      rows.get(node).row.remove();
      rows.delete(node);
    }
  }
  names.forEach((node, at) => {
    if (!rows.has(node)) rows.set(node, makeRow(node));
    const made = rows.get(node);
    if (body.children[at] !== made.row) body.insertBefore(made.row, body.children[at] ?? null);
    updateRow(state, node, planned.get(node), made);
  });
}

function updateRow(state, node, plan, { row, stack, bar, cells }) {
  const [memberState, hostUsed, hostBudget, device] = state.members[node] ?? ["", 0, 0, "cpu"];
  const [rss, budget] = device === "cuda" ? [0, 0] : [hostUsed, hostBudget]; // there the plan is of the GPU's memory
  const found = state.nodes[node] ?? {};
  const lost = isLost(state, node);
  const isInitiator = node === initiatorOf(state);
  const says = lost ? "lost" : isInitiator ? "initiator" : memberState || (plan ? "took part" : "");
  setAttribute(row, "class", `${lost ? "lost" : says === "running" || isInitiator ? "running" : "idle"}${isInitiator ? " initiator" : ""}`);
  setText(cells.state, says);
  setText(cells.blocks, plan ? blocksText(state, plan) : "not in the run");
  const shares = found.shares ?? [0, 0, 1];
  shares.forEach((share, at) => {
    const wanted = `${(100 * share).toFixed(1)}%`;
    if (stack.children[at].style.width !== wanted) stack.children[at].style.width = wanted;
  });
  setText(cells.shares, found.shares ? shares.map(percent).join(" / ") : "–");
  const most = budget || plan?.budget_bytes || 0;
  const used = rss || found.peak_bytes || 0;
  const share = most ? Math.min(1, used / most) : 0;
  bar.children[0].style.width = `${(100 * share).toFixed(1)}%`;
  setAttribute(bar, "class", most && used > most ? "bar full" : "bar");
  bar.children[1].style.left = `${most && plan ? Math.min(99, (100 * plan.needed_bytes) / most).toFixed(1) : -9}%`;
  const planned = plan?.needed_bytes ? `, planned ${bytes(plan.needed_bytes)}` : "";
  setText(cells.memory, most || used ? `${used ? bytes(used) : "–"}${most ? ` of ${bytes(most)}` : " at most"}${planned}` : "–");
}

function blocksText(state, plan) {
  if (plan.helps) return `helps ${plan.helps}`;
  if (plan.stop <= plan.start) return "owner only";
  let trained = 0;
  for (let block = plan.start; block < plan.stop; block += 1) trained += units(state.trains, block) ? 1 : 0;
  return `[${plan.start}, ${plan.stop})  ${trained} trained`;
}
