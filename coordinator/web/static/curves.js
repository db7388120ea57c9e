// Loss and accuracy over steps, with the evaluations as points and a line where one more block began to train.

import { byId, colour, number, setText, table, whenOpen } from "./dom.js";
import { points } from "./store.js";

let chart = null;
let marks = [];
let newest = null;

const axis = (extra) => ({ stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, DejaVu Sans, sans-serif", ...extra });

function make(place, width) {
  const line = (label, name, scale, more = {}) => ({ label, scale, stroke: () => colour(name), width: 1.6, spanGaps: true, points: { show: false }, value: (_, v) => number(v), ...more });
  const dots = { paths: () => null, points: { show: true, size: 9, fill: () => colour("card"), width: 2.4 } };
  return new uPlot(
    {
      width,
      height: heightFor(width),
      padding: [18, 8, 0, 0],
      scales: { x: { time: false }, acc: { range: [0, 1] } },
      legend: { live: true },
      cursor: { points: { size: 6 } },
      axes: [
        axis({ label: "step", labelSize: 18, size: 34, labelFont: "12px system-ui, DejaVu Sans, sans-serif", labelGap: 0 }),
        axis({ scale: "y", size: 46 }),
        axis({ scale: "acc", side: 1, size: 46, grid: { show: false }, values: (_, ticks) => ticks.map((v) => `${Math.round(100 * v)} %`) }),
      ],
      series: [
        { label: "step" },
        line("loss", "op-F", "y"),
        line("accuracy", "op-U", "acc", { width: 1, alpha: 0.45 }),
        line("eval loss", "op-F", "y", dots),
        line("eval accuracy", "op-U", "acc", dots),
      ],
      hooks: { drawClear: [drawMarks] },
    },
    [[], [], [], [], []],
    place,
  );
}

const heightFor = (width) => (width < 480 ? 250 : 430);

function drawMarks(plot) {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = colour("trained");
  ctx.fillStyle = colour("muted");
  ctx.lineWidth = scale;
  ctx.globalAlpha = Math.min(1, 20 / marks.length);
  ctx.font = `${11 * scale}px system-ui, DejaVu Sans, sans-serif`;
  ctx.setLineDash([4 * scale, 4 * scale]);
  let free = -Infinity;
  for (const [step, depth] of marks) {
    const x = plot.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const text = `${depth} train`;
    ctx.globalAlpha = 1;
    if (x > free) {
      ctx.fillText(text, x + 3 * scale, bbox.top - 5 * scale);
      free = x + ctx.measureText(text).width + 8 * scale;
    }
    ctx.globalAlpha = Math.min(1, 20 / marks.length);
  }
  ctx.restore();
}

function series(state, name) {
  const found = points(state, name);
  return [found.map((one) => one[0]), found.map((one) => one[1])];
}

export function drawCurves(state) {
  newest = state;
  const place = byId("curves");
  marks = state.marks;
  const all = ["loss", "accuracy", "eval_loss", "eval_accuracy"].map((name) => series(state, name));
  const losses = all[0];
  if (!chart && losses[0].length) chart = make(place, place.clientWidth || 320);
  chart?.setData(uPlot.join(all));
  const last = losses[0].length - 1;
  const steps = marks.map(([step]) => step);
  const at = steps.length > 4 ? `${steps.slice(0, 2).join(", ")}, ... ${steps.at(-1)}` : steps.join(", ");
  const rises = marks.every(([, depth], index) => index === 0 || depth > marks[index - 1][1]);
  const change = marks.length ? ` ${rises ? "Blocks were unfrozen" : "Other blocks began to train"} at step${steps.length > 1 ? "s" : ""} ${at}; ${marks.at(-1)[1]} train now.` : "";
  setText(byId("curves-text"), last < 0 ? "Nothing is trained yet." : `Loss ${number(losses[1][0])} at step ${losses[0][0]}, ${number(losses[1][last])} at step ${losses[0][last]}.${change}`);
  show();
}

export function resizeCurves() {
  const place = byId("curves");
  if (chart) chart.setSize({ width: place.clientWidth, height: heightFor(place.clientWidth) });
}

export function recolourCurves() {
  chart?.redraw(false, true);
}

const show = whenOpen(byId("curves-details"), byId("curves-table"), () => {
  const losses = points(newest, "loss");
  const accuracies = new Map(points(newest, "accuracy"));
  const every = Math.max(1, Math.ceil(losses.length / 40));
  const rows = losses.filter((_, at) => at % every === 0 || at === losses.length - 1).map(([step, loss]) => [step, number(loss), number(accuracies.get(step)), ""]);
  const evaluated = new Map(points(newest, "eval_accuracy"));
  for (const [step, loss] of points(newest, "eval_loss")) rows.push([step, number(loss), number(evaluated.get(step)), "evaluation"]);
  rows.sort((a, b) => a[0] - b[0]);
  return table(["step", "loss", "accuracy", ""], rows);
});
