// Loss and accuracy over steps: a smoothed line over the faint points of single batches, evaluations as marks that a
// line joins, and a line where one more block began to train.

import { byId, colour, number, setText, table, whenOpen } from "./dom.js";
import { points } from "./store.js";

let chart = null;
let marks = [];
let newest = null;

const axis = (extra) => ({ stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, DejaVu Sans, sans-serif", ...extra });

function make(place, width) {
  const line = (label, name, scale, more = {}) => ({ label, scale, stroke: () => colour(name), width: 1.6, spanGaps: true, points: { show: false }, value: (_, v) => number(v), ...more });
  const batches = (name) => ({ paths: () => null, alpha: 0.4, points: { show: true, size: 4, width: 0, fill: () => colour(name) } });
  const marked = { dash: [5, 4], points: { show: true, size: 9, fill: () => colour("card"), width: 2.4 } };
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
        line("loss of a batch", "op-F", "y", batches("op-F")),
        line("accuracy of a batch", "op-U", "acc", batches("op-U")),
        line("loss, smoothed", "op-F", "y", { width: 2.2 }),
        line("accuracy, smoothed", "op-U", "acc", { width: 2.2 }),
        line("eval loss", "op-F", "y", marked),
        line("eval accuracy", "op-U", "acc", marked),
      ],
      hooks: { drawClear: [drawMarks] },
    },
    [[], [], [], [], [], [], []],
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

const columns = (found) => [found.map((one) => one[0]), found.map((one) => one[1])];

// The mean of each point and its neighbours, a tenth of the curve in all and seven points at least. Of a curve of very
// many steps the points are the lowest and the highest of each stretch, so that this is the middle of both.
function smoothed(found) {
  const reach = Math.max(3, Math.round(found.length / 20));
  const sums = [0];
  for (const [, value] of found) sums.push(sums.at(-1) + value);
  return found.map(([step], at) => {
    const [from, until] = [Math.max(0, at - reach), Math.min(found.length, at + reach + 1)];
    return [step, (sums[until] - sums[from]) / (until - from)];
  });
}

function learningText(state, smooth) {
  if (!smooth.length) return "Nothing is trained yet.";
  const [first, last] = [smooth[0], smooth.at(-1)];
  const way = `Loss, smoothed: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}.`;
  const judged = points(state, "eval_loss");
  if (!judged.length) return way;
  const best = judged.reduce((least, one) => (one[1] < least[1] ? one : least));
  const newest = judged.at(-1);
  const lowest = best === newest ? (judged.length > 1 ? ", the lowest so far" : "") : `, the lowest was ${number(best[1])} at step ${best[0]}`;
  const risen = state.run.evaluation?.risen;
  return `${way} Evaluation loss ${number(newest[1])} at step ${newest[0]}${lowest}.${risen ? ` ${risen[0].toUpperCase()}${risen.slice(1)}.` : ""}`;
}

function unfreezingText(state) {
  const all = state.plan.num_blocks;
  if (!marks.length || !all || state.run.last?.trains) return "";
  const now = marks.at(-1)[1];
  const count = now === all ? `all ${all} train now` : `${now} of ${all} train now`;
  if (marks.length === 1) return ` Of the blocks ${count}.`;
  const steps = marks.map((one) => one[0]);
  const listed = steps.length > 4 ? `${steps[0]}, ${steps[1]}, … ${steps.at(-1)}` : `${steps.slice(0, -1).join(", ")} and ${steps.at(-1)}`;
  return ` Blocks were unfrozen at steps ${listed}; ${count}.`;
}

export function drawCurves(state) {
  newest = state;
  const place = byId("curves");
  marks = state.marks;
  const [losses, accuracies, judged, right] = ["loss", "accuracy", "eval_loss", "eval_accuracy"].map((name) => points(state, name));
  const smooth = smoothed(losses);
  if (!chart && losses.length) chart = make(place, place.clientWidth || 320);
  chart?.setData(uPlot.join([losses, accuracies, smooth, smoothed(accuracies), judged, right].map(columns)));
  setText(byId("curves-text"), `${learningText(state, smooth)}${unfreezingText(state)}`);
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
