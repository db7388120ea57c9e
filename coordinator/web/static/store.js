// The state of the run, as far as the server has told it; frames bring what changed, and drawings are told what to redraw.

export function emptyState() {
  return { run: {}, plan: {}, trains: [], nodes: {}, links: [], gantt: {}, events: [], marks: [], members: {}, curves: {} };
}

export class Store {
  constructor(draw) {
    this.state = emptyState();
    this.skipped = 0;
    this._draw = draw;
    this._changed = new Set();
    this._waits = false;
  }

  take(frame) {
    if ("whole" in frame) {
      this.state = emptyState();
      for (const name of Object.keys(this.state)) this._changed.add(name);
    }
    for (const [name, value] of Object.entries(frame)) {
      if (name === "curves") this._takeCurves(value);
      else if (name === "skipped") this.skipped += value;
      else if (name !== "whole") this.state[name] = value;
      this._changed.add(name);
    }
    if (!this._waits) {
      this._waits = true;
      requestAnimationFrame(() => this.flush());
    }
  }

  flush() {
    this._waits = false;
    const changed = this._changed;
    this._changed = new Set();
    if (changed.size) this._draw(this.state, changed);
  }

  all() {
    for (const name of Object.keys(this.state)) this._changed.add(name);
    this.flush();
  }

  _takeCurves(curves) {
    for (const [name, part] of Object.entries(curves)) {
      const had = this.state.curves[name] ?? { settled: [], open: [] };
      had.settled.length = Math.min(had.settled.length, part.from);
      had.settled.push(...part.points);
      this.state.curves[name] = { settled: had.settled, open: part.open };
    }
  }
}

export const points = (state, name) => {
  const curve = state.curves[name];
  return curve ? [...curve.settled, ...curve.open] : [];
};
