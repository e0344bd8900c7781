"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const NAMES = {
    loss: "Loss", difference: `Difference from ${data.baseline}${data.unit ? `, ${data.unit}` : ""}`,
    grad_norm: "Gradient norm (logarithmic)", loss_scale: "Loss scale (logarithmic)",
    fp8_snr: "Output of the FP8 layer with most noise, dB", fp8_underflow: "Share of values that become zero in FP8, the tensor with most",
    fp8_saturated: "Share of values that saturate in FP8, the tensor with most",
  };
  const LOGARITHMIC = new Set(["grad_norm", "loss_scale"]);
  const WIDEST = 1100, NARROWEST = 300, HEIGHT = 300, LEFT = 64, RIGHT = 14, TOP = 12, BOTTOM = 62;
  const plots = Object.entries(data.plots).filter(([, series]) => series.length);
  for (const [, all] of plots) {
    for (const series of all) {
      series.values = series.values.map(Number);
      series.means = series.means.map(Number);
    }
  }
  const steps = plots.flatMap(([, all]) => all.flatMap((series) => series.steps));
  if (!steps.length) return;
  const first = steps.reduce((a, b) => Math.min(a, b)), last = steps.reduce((a, b) => Math.max(a, b));
  const state = { low: first, high: Math.max(last, first + 1), at: last, hidden: new Set(), whole: false };
  const charts = [];
  let WIDTH = WIDEST;

  function make(tag, attributes = {}, text) {
    const svg = ["svg", "g", "path", "line", "rect", "text", "clipPath", "title"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  const style = (color) => `s${color === 0 ? 0 : ((color - 1) % 6) + 1} d${Math.floor(color === 0 ? 0 : color % 4)}`;
  const shown = (value) => {
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  };
  const visible = (series) => !state.hidden.has(series.arm);
  const x = (step) => LEFT + ((step - state.low) / (state.high - state.low)) * (WIDTH - LEFT - RIGHT);
  const stepAt = (px) => state.low + ((px - LEFT) / (WIDTH - LEFT - RIGHT)) * (state.high - state.low);

  // The index of the last record at or before a step.
  function before(list, step) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] <= step) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
    const found = [];
    for (let value = Math.ceil(low / size) * size; value <= high + size / 1e6; value += size) found.push(value);
    return found;
  }

  // The range of the values in view. Unless all are wanted, it follows the means, so that a spike does not flatten the rest.
  function range(all, logarithmic, name) {
    const found = [];
    for (const series of all.filter(visible)) {
      const inView = series.steps
        .map((step, i) => (step >= state.low && step <= state.high ? series.values[i] : NaN))
        .filter((value) => Number.isFinite(value) && !(logarithmic && value <= 0))
        .sort((a, b) => a - b);
      if (!inView.length) continue;
      if (name === "difference" && series.means.length && !state.whole) {
        const means = series.means.filter((value, i) => Number.isFinite(value) && series.mean_steps[i] >= state.low && series.mean_steps[i] <= state.high);
        if (means.length) { found.push([Math.min(...means), Math.max(...means), false]); continue; }
      }
      const cut = state.whole ? 0 : Math.floor(inView.length * 0.01);
      found.push([inView[cut], inView[inView.length - 1 - cut], series.color === 0]);
    }
    if (!found.length) return logarithmic ? [1, 10] : [0, 1];
    let low = Math.min(...found.map((each) => each[0])), high = Math.max(...found.map((each) => each[1]));
    const base = found.find((each) => each[2]);
    if (name === "loss" && base && !state.whole) {
      const span = base[1] - base[0] || Math.abs(base[1]) || 1;
      high = Math.min(high, base[1] + span);
      low = Math.max(low, base[0] - span);
    }
    if (name === "difference") {
      const near = state.whole ? Infinity : 12 * data.margin;
      low = Math.max(Math.min(low, -1.5 * data.margin), -near);
      high = Math.min(Math.max(high, 1.5 * data.margin), near);
    }
    if (logarithmic) return [low / 1.3, high * 1.3];
    const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  }

  function path(list, values, y, step) {
    let drawn = "", open = false;
    const from = Math.max(0, before(list, state.low)), to = Math.min(list.length - 1, before(list, state.high) + 1);
    for (let i = from; i <= to; i += 1) {
      if (!Number.isFinite(y(values[i]))) { open = false; continue; }
      const px = x(list[i]).toFixed(1), py = y(values[i]).toFixed(1);
      drawn += open ? (step ? `H${px}V${py}` : `L${px} ${py}`) : `M${px} ${py}`;
      if (!open && to === from) drawn += "h2";
      open = true;
    }
    return drawn;
  }

  function draw(chart) {
    const { svg, name, all } = chart;
    const logarithmic = LOGARITHMIC.has(name);
    const [low, high] = range(all, logarithmic, name);
    const scale = (value) => (logarithmic ? Math.log10(value) : value);
    const y = (value) => {
      if (!Number.isFinite(value) || (logarithmic && value <= 0)) return NaN;
      const py = TOP + ((scale(high) - scale(value)) / (scale(high) - scale(low))) * (HEIGHT - TOP - BOTTOM);
      return Math.max(-HEIGHT, Math.min(2 * HEIGHT, py));
    };
    const bottom = HEIGHT - BOTTOM;
    svg.replaceChildren();
    const clip = make("clipPath", { id: `clip-${name}` });
    clip.append(make("rect", { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: bottom - TOP }));
    const body = make("g", { "clip-path": `url(#clip-${name})` });
    if (data.from !== null && (name === "loss" || name === "difference")) {
      body.append(make("rect", { class: "warm", x: LEFT, y: TOP, width: Math.max(0, x(data.from) - LEFT), height: bottom - TOP }));
    }
    if (name === "difference") {
      const top = y(data.margin);
      body.append(make("rect", { class: "band", x: LEFT, y: top, width: WIDTH - LEFT - RIGHT, height: y(-data.margin) - top }));
    }
    const axis = make("g", { class: "axis" });
    const marks = logarithmic ? logTicks(low, high) : ticks(low, high, 5);
    for (const value of marks) {
      axis.append(make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
      axis.append(make("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
    }
    for (const step of ticks(state.low, state.high, Math.max(3, Math.round(WIDTH / 140)))) {
      axis.append(make("line", { x1: x(step), x2: x(step), y1: bottom, y2: bottom + 5 }));
      axis.append(make("text", { x: x(step), y: HEIGHT - 22, "text-anchor": "middle" }, shown(step)));
    }
    axis.append(make("text", { class: "label", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step"));
    axis.append(make("path", { d: `M${LEFT} ${TOP}V${bottom}H${WIDTH - RIGHT}` }));
    for (const series of all.filter(visible)) {
      const only = series.means.length && name !== "loss_scale" ? "" : "only";
      body.append(make("path", { class: `plain ${only} ${only ? style(series.color) : style(series.color).split(" ")[0]}`, d: path(series.steps, series.values, y, name === "loss_scale") }));
      if (!only) body.append(make("path", { class: `mean ${style(series.color)}`, d: path(series.mean_steps, series.means, y, false) }));
      for (const [from, to] of lostParts(series)) {
        const mark = make("path", { class: `lost ${style(series.color).split(" ")[0]}`, d: `M${x(from) - 5} ${TOP + 1}l10 10m0 -10l-10 10m5 -5H${Math.max(x(from), x(to))}` });
        mark.append(make("title", {}, `${series.label}: not finite from step ${from} to ${to}`));
        body.append(mark);
      }
    }
    const line = make("g");
    for (const event of data.events) {
      if (event.step === null || event.step < state.low || event.step > state.high || state.hidden.has(event.run)) continue;
      const mark = make("path", { class: `event ${style(event.color).split(" ")[0]}`, d: `M${x(event.step)} ${bottom + 6}v14` });
      mark.append(make("title", {}, `${event.kind} at step ${event.step}, ${event.run}. ${event.text}`));
      line.append(mark);
    }
    chart.cursor = make("line", { class: "cursor", y1: TOP, y2: bottom });
    chart.zoom = make("rect", { class: "zoom", y: TOP, height: bottom - TOP, width: 0 });
    svg.append(clip, axis, body, line, chart.cursor, chart.zoom);
    point(chart);
  }

  // The parts in view in which a series is not finite: first and last step of each.
  function lostParts(series) {
    const found = [];
    let open = false;
    series.steps.forEach((step, i) => {
      const lost = !Number.isFinite(series.values[i]);
      if (lost && step >= state.low && step <= state.high) {
        if (open) found[found.length - 1][1] = step; else found.push([step, step]);
      }
      open = lost && step >= state.low;
    });
    return found;
  }

  function logTicks(low, high) {
    const from = Math.ceil(Math.log10(low)), to = Math.floor(Math.log10(high));
    const every = Math.max(1, Math.ceil((to - from) / 6)), found = [];
    for (let power = from; power <= to; power += every) found.push(10 ** power);
    if (found.length > 1) return found;
    for (const factors of [[1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      const finer = [];
      for (let power = from - 1; power <= to; power += 1) {
        finer.push(...factors.map((factor) => factor * 10 ** power).filter((value) => value >= low && value <= high));
      }
      if (finer.length > 1) return finer;
    }
    return ticks(low, high, 3);
  }

  function point(chart) {
    const inside = state.at >= state.low && state.at <= state.high;
    chart.cursor.setAttribute("visibility", inside ? "visible" : "hidden");
    for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, x(state.at));
  }

  function readout() {
    const parts = [];
    for (const [name, all] of plots) {
      const values = all.filter(visible).flatMap((series) => {
        const i = before(series.steps, state.at);
        return i < 0 ? [] : [`${series.label} ${shown(series.values[i])}`];
      });
      if (values.length) parts.push(`${NAMES[name].split(" (")[0]}: ${values.join(", ")}`);
    }
    byId("at").textContent = `Step ${state.at}. ${parts.join(". ")}`;
    byId("cursor").setAttribute("aria-valuetext", `step ${state.at}`);
  }

  function moveTo(step) {
    state.at = Math.round(Math.max(first, Math.min(last, step)));
    byId("cursor").value = state.at;
    charts.forEach(point);
    readout();
  }

  // The values of a plot at the pointer, next to it, and the events of these few pixels in words.
  function tell(chart, px) {
    const near = 6 * (state.high - state.low) / (WIDTH - LEFT - RIGHT), lines = [make("b", {}, `Step ${state.at}`)];
    for (const series of chart.all.filter(visible)) {
      const i = before(series.steps, state.at);
      if (i >= 0) lines.push(make("span", { class: `key ${style(series.color).split(" ")[0]}` }, `${series.label}: ${shown(series.values[i])}`));
    }
    const events = data.events.filter((event) => event.step !== null && Math.abs(event.step - state.at) <= near && !state.hidden.has(event.run));
    for (const event of events.slice(0, 4)) lines.push(make("span", {}, `${event.run}, step ${event.step}: ${event.kind}`));
    if (events.length > 4) lines.push(make("span", {}, `and ${events.length - 4} more events`));
    chart.tip.replaceChildren(...lines);
    chart.tip.hidden = false;
    const share = px / WIDTH;
    chart.tip.style.left = share < 0.6 ? `calc(${100 * share}% + 14px)` : "auto";
    chart.tip.style.right = share < 0.6 ? "auto" : `calc(${100 - 100 * share}% + 14px)`;
  }

  function zoomTo(low, high) {
    state.low = Math.max(first, Math.min(low, high));
    state.high = Math.min(Math.max(last, first + 1), Math.max(low, high));
    if (state.high - state.low < 2) state.high = state.low + 2;
    byId("low").value = Math.round(state.low);
    byId("high").value = Math.round(state.high);
    charts.forEach(draw);
  }

  function zoomBy(factor) {
    const middle = state.at >= state.low && state.at <= state.high ? state.at : (state.low + state.high) / 2;
    zoomTo(middle - (middle - state.low) * factor, middle + (state.high - middle) * factor);
  }

  // A plot is as many units wide as it has pixels, so that its text stays readable on a small screen.
  function fit(wanted) {
    const room = charts.length ? charts[0].svg.getBoundingClientRect().width : WIDEST;
    WIDTH = wanted ?? Math.round(Math.min(WIDEST, Math.max(NARROWEST, room)));
    for (const chart of charts) chart.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    charts.forEach(draw);
  }

  function follow(chart) {
    const { svg } = chart;
    let from = null;
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      return Math.max(LEFT, Math.min(WIDTH - RIGHT, ((event.clientX - box.left) / box.width) * WIDTH));
    };
    svg.addEventListener("pointermove", (event) => {
      const px = at(event);
      moveTo(stepAt(px));
      tell(chart, px);
      if (from !== null) {
        chart.zoom.setAttribute("x", Math.min(from, px));
        chart.zoom.setAttribute("width", Math.abs(px - from));
      }
    });
    svg.addEventListener("pointerdown", (event) => { from = at(event); svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointerup", (event) => {
      const px = at(event), start = from;
      from = null;
      if (start !== null && Math.abs(px - start) > 6) zoomTo(stepAt(start), stepAt(px));
    });
    svg.addEventListener("pointercancel", () => { from = null; chart.zoom.setAttribute("width", 0); });
    svg.addEventListener("pointerleave", () => { chart.tip.hidden = true; });
    svg.addEventListener("dblclick", () => zoomTo(first, last));
  }

  // The values of a plot at up to 20 steps: for readers who do not see the lines.
  function table(all) {
    const details = make("details"), own = make("table"), head = make("tr"), count = Math.min(20, last - first + 1);
    details.append(make("summary", {}, "Values as a table"));
    head.append(make("th", { scope: "col" }, "Step"), ...all.map((series) => make("th", { scope: "col" }, series.label)));
    own.append(make("thead"), make("tbody"));
    own.tHead.append(head);
    for (let i = 0; i < count; i += 1) {
      const step = Math.round(first + ((last - first) * i) / Math.max(1, count - 1)), row = make("tr");
      row.append(make("th", { scope: "row" }, step));
      for (const series of all) {
        const steps_ = series.mean_steps.length ? series.mean_steps : series.steps;
        const values = series.mean_steps.length ? series.means : series.values, k = before(steps_, step);
        row.append(make("td", {}, k < 0 ? "" : shown(values[k])));
      }
      own.tBodies[0].append(row);
    }
    details.append(own);
    return details;
  }

  function summary(name, all) {
    return `${NAMES[name]} by step, from ${first} to ${last}. ` + all.map((series) => {
      const lost = series.values.filter((value) => !Number.isFinite(value)).length;
      const ends = `${series.label}: from ${shown(series.values[0])} to ${shown(series.values[series.values.length - 1])}`;
      return lost ? `${ends}, ${lost} values that are not finite` : ends;
    }).join(". ");
  }

  function legend() {
    const arms = new Map([...plots.flatMap(([, all]) => all).map((series) => [series.arm, series.color])]);
    for (const [arm, color] of arms) {
      const button = make("button", { type: "button", "aria-pressed": "true" });
      const line = make("svg", { width: 34, height: 10, "aria-hidden": "true" });
      line.append(make("path", { class: `mean ${style(color)}`, d: "M1 5H33" }));
      button.append(line, arm);
      button.addEventListener("click", () => {
        if (state.hidden.has(arm)) state.hidden.delete(arm); else state.hidden.add(arm);
        button.setAttribute("aria-pressed", String(!state.hidden.has(arm)));
        charts.forEach(draw);
        readout();
      });
      byId("legend").append(button);
    }
  }

  function listEvents() {
    if (!data.events.length) return;
    const body = byId("events").querySelector("tbody");
    for (const event of [...data.events].sort((a, b) => (a.step ?? -1) - (b.step ?? -1))) {
      const row = make("tr"), cell = make("td");
      if (event.step !== null) {
        const button = make("button", { type: "button", "aria-label": `Move the cursor to step ${event.step}` }, event.step);
        button.addEventListener("click", () => moveTo(event.step));
        cell.append(button);
      }
      row.append(cell, ...[event.run, event.kind, event.text].map((text) => make("td", {}, text)));
      body.append(row);
    }
    if (data.left_out) byId("events").append(make("p", {}, `${data.left_out} more events are not listed.`));
    byId("events").hidden = false;
  }

  function theme() {
    const button = byId("theme"), names = ["automatic", "light", "dark"];
    let now = 0;
    button.hidden = false;
    button.addEventListener("click", () => {
      now = (now + 1) % 3;
      button.textContent = `Theme: ${names[now]}`;
      if (now) document.documentElement.dataset.theme = names[now];
      else delete document.documentElement.dataset.theme;
    });
  }

  for (const [name, all] of plots) {
    const figure = make("figure"), caption = make("figcaption");
    caption.append(make("h3", {}, NAMES[name]));
    if (all.some((series) => series.thinned)) {
      caption.append(`${all.filter((series) => series.thinned).map((series) => series.label).join(", ")}: thinned for this page,` +
        " keeping the highest and lowest values; the tests used all.");
    }
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary(name, all) });
    const frame = make("div", { class: "plot" }), tip = make("div", { class: "tip", "aria-hidden": "true" });
    tip.hidden = true;
    frame.append(svg, tip);
    figure.append(caption, frame, table(all));
    byId("charts").append(figure);
    const chart = { svg, name, all, tip };
    charts.push(chart);
    follow(chart);
  }
  legend();
  listEvents();
  theme();
  byId("controls").hidden = false;
  Object.assign(byId("cursor"), { min: first, max: last, value: state.at });
  byId("cursor").addEventListener("input", (event) => moveTo(Number(event.target.value)));
  for (const id of ["low", "high"]) {
    byId(id).addEventListener("change", () => zoomTo(Number(byId("low").value), Number(byId("high").value)));
  }
  byId("in").addEventListener("click", () => zoomBy(0.5));
  byId("out").addEventListener("click", () => zoomBy(2));
  byId("reset").addEventListener("click", () => zoomTo(first, last));
  byId("whole").addEventListener("change", (event) => { state.whole = event.target.checked; charts.forEach(draw); });
  zoomTo(first, last);
  moveTo(last);
  fit();
  window.addEventListener("resize", () => fit());
  window.addEventListener("beforeprint", () => fit(WIDEST));
  window.addEventListener("afterprint", () => fit());
})();
