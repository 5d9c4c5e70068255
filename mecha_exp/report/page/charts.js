"use strict";
// Interactive figures, drawn by plotly when they come into view. Settings are numbered as in `data`.
const data = JSON.parse(document.getElementById("data").textContent);
const count = data.names.length;
const main = data.metrics[0];
const rows = new Map([...document.querySelectorAll("#results tr[data-setting]")].map(row => [Number(row.dataset.setting), row]));
const DARK = matchMedia("(prefers-color-scheme: dark)");
const SYMBOLS = ["circle", "square", "diamond", "triangle-down", "triangle-up", "pentagon", "star", "cross"];
const MOST_STEPS = 40; // of a line
const CONFIG = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
const plain = text => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const shown = number => number === null || number === undefined ? "–" : String(Number(number.toPrecision(4)));
const cut = (text, most = 36) => text.length <= most ? text : `${text.slice(0, most / 3)}…${text.slice(2 - 2 * most / 3)}`;
const varied = column => new Set(column.values.filter(v => v !== null)).size + column.values.includes(null) > 1;
const shade = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const title = column => column === main && data.unit ? `${column.name} [${data.unit}]` : column.name;

const withInterval = (metric, i) => shown(metric.values[i]) + (metric.intervals?.[i] ? ` [${metric.intervals[i].map(shown).join(", ")}]` : "");

// What is known of a setting: as pairs of words, and as plotly's text.
const compared = new Map((data.forest?.rows ?? []).map(row => [row.setting, row]));
const facts = i => {
  const pairs = data.keys.map(key => [key.name, key.numeric ? shown(key.values[i]) : key.values[i] ?? "–"]);
  pairs.push([main.name, withInterval(main, i)]);
  const row = compared.get(i);
  if (row) {
    pairs.push([`less ${data.forest.against}`, `${shown(row.difference)} [${shown(row.low)}, ${shown(row.high)}] on ${row.split}`]);
    pairs.push(["p", `${shown(row.p)}, ${shown(row.pHolm)} after Holm: ${row.told ? "told apart" : "not told apart"}`]);
  }
  return pairs;
};
const tip = i => facts(i).map(([name, text]) => `${plain(cut(name))}: ${plain(cut(text, 60))}`).join("<br>");

// One setting is selected: its row, its numbers and its commands.
const panel = document.getElementById("chosen");
const select = i => {
  rows.forEach((row, number) => row.classList.toggle("chosen", number === i));
  panel.hidden = i === null;
  if (i === null) return;
  const list = make("dl");
  const others = data.metrics.slice(1).filter(metric => metric.values[i] !== null).map(metric => [metric.name, withInterval(metric, i)]);
  [...facts(i), ...others].forEach(([name, text]) => list.append(make("dt", name), make("dd", text)));
  const commands = data.points[i].filter(([, signature]) => signature);
  const code = make("pre", commands.map(([name, signature]) =>
    (commands.length > 1 ? `# ${name}\n` : "") + `python -m mecha_exp reproduce ${signature}`).join("\n"));
  const go = make("button", "Show its row", { type: "button", onclick: () => rows.get(i).scrollIntoView({ block: "center" }) });
  const close = make("button", "Close", { type: "button", onclick: () => select(null) });
  panel.replaceChildren(make("h2", data.names[i]), list, ...(commands.length ? [make("span", "Make it again:"), code] : []), go, " ", close);
};
rows.forEach((row, i) => {
  row.tabIndex = 0;
  row.addEventListener("click", () => select(i));
  row.addEventListener("keydown", event => { if (event.key === "Enter") select(i); });
});
addEventListener("keydown", event => { if (event.key === "Escape") select(null); });

// The table shows what passes the words in its filter and the ranges of the parallel coordinates.
const ranges = new Map(); // of an axis: its places of all settings, and the marked intervals
const tools = make("div", "", { className: "tools" });
const words = make("input", "", { type: "search", placeholder: "such as ties", ariaLabel: "Filter the rows by words" });
const told = make("output");
const clear = make("button", "Show all", { type: "button", hidden: true });
const search = make("label", "Filter ");
search.append(words);
tools.append(search, told, clear);
document.querySelector("#results").parentElement.before(tools);
const texts = new Map([...rows].map(([i, row]) => [i, row.textContent.toLowerCase()]));
const passes = i => words.value.toLowerCase().split(/\s+/).every(word => (texts.get(i) ?? "").includes(word))
  && [...ranges.values()].every(({ places, marked }) => marked.some(([low, high]) => places[i] >= low && places[i] <= high));
const filter = () => {
  const passing = new Set([...rows.keys()].filter(passes));
  rows.forEach((row, i) => { row.hidden = !passing.has(i); });
  told.textContent = passing.size < rows.size ? `${passing.size} of ${rows.size} settings` : `${rows.size} settings`;
  clear.hidden = passing.size === rows.size;
  charts.curves.redraw?.();
};
words.addEventListener("input", filter);
clear.addEventListener("click", () => {
  words.value = "";
  ranges.clear();
  charts.parallel.redraw?.();
  filter();
});

const layout = more => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: shade("--text"), size: 13 },
  margin: { l: 60, r: 20, t: 20, b: 50 }, hovermode: "closest", hoverlabel: { align: "left" }, dragmode: "zoom",
  modebar: { bgcolor: "rgba(0,0,0,0)", color: shade("--dim"), activecolor: shade("--text") }, ...more,
});
const axis = more => ({ gridcolor: shade("--line"), zerolinecolor: shade("--dim"), automargin: true, ...more });

// Differences to the chosen setting, with their intervals.
const drawForest = box => {
  const { rows: all, labels, against, detectable } = data.forest;
  const drawn = all.slice(0, labels.length);
  const mixed = new Set(drawn.map(row => row.split)).size > 1;
  const group = (apart, name) => {
    const part = drawn.map((row, y) => ({ ...row, y })).filter(row => row.told === apart);
    return {
      type: "scatter", mode: "markers", name, x: part.map(row => row.difference), y: part.map(row => row.y),
      customdata: part.map(row => row.setting), hoverinfo: "text", hovertext: part.map(row => tip(row.setting)),
      marker: { size: 9, color: shade(apart ? "--told" : "--page"), line: { width: 2, color: shade(apart ? "--told" : "--dim") } },
      error_x: { color: shade(apart ? "--told" : "--dim"), type: "data", symmetric: false, width: 0, thickness: 1.6,
        array: part.map(row => row.high === null ? 0 : row.high - row.difference),
        arrayminus: part.map(row => row.low === null ? 0 : row.difference - row.low) },
    };
  };
  const band = detectable === null ? [] : [{ type: "rect", xref: "x", yref: "paper", x0: -detectable, x1: detectable, y0: 0, y1: 1,
    fillcolor: shade("--dim"), opacity: 0.15, line: { width: 0 }, layer: "below" }];
  const most = box.clientWidth < 600 ? 18 : 40;
  const side = data.better === "less" ? "left" : "right";
  const from = all.length > drawn.length ? ` (the nearest ${drawn.length} of ${all.length})` : "";
  const ticktext = drawn.map((row, y) => cut(labels[y], most) + (mixed && most > 18 ? ` (${row.split})` : ""));
  return Plotly.react(box, [group(true, "told apart"), group(false, "not told apart")], layout({
    height: 150 + 20 * drawn.length, shapes: band, showlegend: true,
    legend: { orientation: "h", x: 1, xanchor: "right", y: 0, yref: "container", yanchor: "bottom" },
    margin: { l: 12 + 7.4 * Math.max(...ticktext.map(text => text.length)), r: 20, t: 30, b: 80 },
    xaxis: axis({ title: { text: `difference in ${plain(data.metric)} to ${plain(cut(against, most))}; better: ${side}${from}`, font: { size: 12 } } }),
    yaxis: axis({ tickmode: "array", tickvals: drawn.map((_, y) => y), tickfont: { size: 12 }, range: [drawn.length - 0.4, -0.6],
      ticktext: ticktext.map(plain), automargin: false, showgrid: false, zeroline: false }),
  }), CONFIG);
};

// A metric over a numeric key: a mark for each setting, a line through the best one at each value.
const choice = (name, columns, index) => {
  const label = make("label", `${name} `), list = make("select");
  columns.forEach((column, i) => list.append(make("option", column.name, { value: i, selected: i === index })));
  list.addEventListener("change", () => charts.curves.redraw());
  label.append(list);
  return [label, () => columns[list.value]];
};
const numeric = data.keys.filter(key => key.numeric);
const wordy = [{ name: "nothing", values: data.names.map(() => "") }, ...data.keys.filter(key => varied(key))];
const widest = numeric.reduce((best, key, i) => new Set(key.values).size > new Set(numeric[best].values).size ? i : best, 0);
const method = data.method === null ? -1 : wordy.indexOf(data.keys[data.method]);
const [ofMetric, metricNow] = choice("Metric", data.metrics, 0);
const [overKey, keyNow] = choice("over", numeric, widest);
const [byKey, linesNow] = choice("a line for each", wordy, method > 0 ? method : Math.max(0, wordy.findIndex(key => key.values.some(v => v) && key !== numeric[widest])));
const drawCurves = box => {
  if (!box.previousElementSibling) {
    const bar = make("div", "", { className: "tools" });
    bar.append(ofMetric, overKey, byKey);
    box.before(bar);
  }
  const metric = metricNow(), key = keyNow(), lines = linesNow();
  const groups = new Map();
  for (let i = 0; i < count; i++) {
    if (metric.values[i] === null || key.values[i] === null || (rows.has(i) && rows.get(i).hidden)) continue;
    const name = lines.values[i] ?? "–";
    groups.set(name, [...(groups.get(name) ?? []), i]);
  }
  const colours = DARK.matches ? data.coloursOnBlack : data.colours;
  const sign = data.better === "less" ? -1 : 1;
  const traces = [...groups].flatMap(([name, members], n) => {
    const colour = colours[n % colours.length], best = new Map();
    members.forEach(i => {
      const other = best.get(key.values[i]);
      if (other === undefined || sign * metric.values[i] > sign * metric.values[other]) best.set(key.values[i], i);
    });
    const path = [...best.values()].sort((a, b) => key.values[a] - key.values[b]);
    const spread = i => metric.intervals?.[i];
    const marks = {
      type: "scatter", mode: "markers", name: plain(cut(String(name))), legendgroup: String(n), customdata: members,
      x: members.map(i => key.values[i]), y: members.map(i => metric.values[i]), hoverinfo: "text", hovertext: members.map(tip),
      marker: { color: colour, symbol: SYMBOLS[n % SYMBOLS.length], size: 8 }, showlegend: groups.size > 1,
    };
    if (members.some(spread)) marks.error_y = { type: "data", symmetric: false, thickness: 1, width: 2,
      color: members.length > 40 ? shade("--line") : colour,
      array: members.map(i => spread(i) ? spread(i)[1] - metric.values[i] : 0),
      arrayminus: members.map(i => spread(i) ? metric.values[i] - spread(i)[0] : 0) };
    if (path.length > MOST_STEPS) return [marks]; // of drawn values a line would say nothing
    return [{ type: "scatter", mode: "lines", x: path.map(i => key.values[i]), y: path.map(i => metric.values[i]), hoverinfo: "skip",
      legendgroup: String(n), showlegend: false, line: { color: colour, width: 2 } }, marks];
  });
  const inputs = metric === main ? data.inputs.filter(({ value }) => value !== null) : [];
  const ys = metric.values.filter(y => y !== null), low = Math.min(...ys), high = Math.max(...ys), reach = 0.6 * (high - low || 1);
  const near = inputs.filter(({ value: y, always }) => always || y >= low - reach && y <= high + reach);
  const xs = key.values.filter(x => x !== null), log = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) >= 20;
  return Plotly.react(box, traces, layout({
    height: 440, xaxis: axis({ title: { text: plain(key.name) }, type: log ? "log" : "linear", zeroline: false }),
    yaxis: axis({ title: { text: plain(title(metric)) }, zeroline: false }), legend: { title: { text: plain(lines.name) } },
    shapes: [...near.filter(({ interval, always }) => always && interval).map(({ interval: [y0, y1] }) => ({ type: "rect", xref: "paper", x0: 0, x1: 1, y0, y1,
      fillcolor: shade("--dim"), opacity: 0.12, line: { width: 0 }, layer: "below" })),
    ...near.map(({ value: y }) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: shade("--dim"), width: 1, dash: "dot" } }))],
    annotations: near.map(({ name, value: y }) => ({ xref: "paper", x: 1, y, xanchor: "right", yanchor: "bottom", showarrow: false, text: plain(cut(name, 20)), font: { size: 11, color: shade("--dim") } })),
  }), CONFIG);
};

// An axis for each swept key and metric; an interval that is marked on an axis filters the table.
const measured = [...Array(count).keys()].filter(i => main.values[i] !== null);
const axisOf = column => {
  const present = [...new Set(measured.map(i => column.values[i]).filter(v => v !== null))];
  const numbers = column.numeric !== false;
  if (numbers) present.sort((a, b) => a - b);
  const log = numbers && present[0] > 0 && present.at(-1) / present[0] >= 20 && column.numeric;
  const place = v => v === null ? null : numbers ? (log ? Math.log10(v) : v) : present.indexOf(v);
  const places = column.values.map(place), low = numbers ? place(present[0]) : 0, high = numbers ? place(present.at(-1)) : present.length - 1;
  const foot = low - 0.15 * (high - low || 1), lacking = measured.some(i => places[i] === null);
  const ticks = !numbers || column.numeric && present.length <= 12 ? present : log ? present.filter((_, n) => n % Math.ceil(present.length / 10) === 0) : null;
  const dimension = { label: plain(cut(title(column), 22)), values: [] };
  if (ticks || lacking) {
    const some = ticks ?? [0, 1, 2, 3, 4].map(n => low + n * (high - low) / 4);
    const named = some.slice(0, 40).map(v => [ticks ? place(v) : v, numbers ? shown(v) : cut(String(v), 18)]);
    if (lacking) named.unshift([foot, "–"]);
    Object.assign(dimension, { tickvals: named.map(([at]) => at), ticktext: named.map(([, text]) => plain(text)) });
  }
  const filled = places.map(at => at ?? foot);
  dimension.values = measured.map(i => filled[i]);
  return { dimension, places: filled };
};
const onAxes = [...data.keys.filter(varied), ...data.metrics.filter(varied).slice(0, 8)];
let axes = [];
const drawParallel = async box => {
  if (!document.createElement("canvas").getContext("webgl")) throw new Error("parallel coordinates need WebGL");
  const first = !axes.length;
  axes = onAxes.map(axisOf);
  const dimensions = axes.map(({ dimension }, n) => ({ ...dimension, constraintrange: ranges.get(n)?.marked }));
  const colours = measured.map(i => main.values[i]);
  await Plotly.react(box, [{
    type: "parcoords", dimensions, labelfont: { size: 12 }, tickfont: { size: 11, color: shade("--text") }, rangefont: { size: 10, color: shade("--dim") },
    line: { color: colours, colorscale: "Cividis", reversescale: data.better !== "less", showscale: true, colorbar: { title: { text: plain(cut(data.metric, 20)) }, thickness: 12 } },
    unselected: { line: { color: shade("--line"), opacity: 0.25 } },
  }], layout({ height: 460, margin: { l: 80, r: 40, t: 70, b: 30 } }), { ...CONFIG, modeBarButtons: [["toImage"]] });
  if (!first) return;
  let under = null;
  box.on("plotly_restyle", () => {
    ranges.clear();
    box.data[0].dimensions.forEach(({ constraintrange: marked }, n) => {
      if (marked?.length) ranges.set(n, { places: axes[n].places, marked: Array.isArray(marked[0]) ? marked : [marked] });
    });
    filter();
  });
  const line = make("p", "Hover over a line to name its setting, click to select it.", { className: "hint" });
  box.after(line);
  box.on("plotly_hover", ({ curveNumber }) => {
    under = measured[curveNumber] ?? null;
    if (under !== null) line.textContent = `${data.names[under]}: ${main.name} ${shown(main.values[under])}`;
  });
  box.on("plotly_unhover", () => { under = null; });
  box.addEventListener("click", () => { if (under !== null) select(under); });
};

const charts = {
  forest: { draw: drawForest, hint: "Hover for the numbers, click a mark to select its setting." },
  curves: { draw: drawCurves, hint: "Hover for the numbers, click a mark to select its setting. A line goes through the best setting at each value of a grid; bars are 95 % intervals." },
  parallel: { draw: drawParallel, hint: "Drag along an axis to mark an interval: the table and the curves show what passes. Click the axis to clear it." },
};

let library = null;
const unpack = async () => {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", await new Response(stream).text()));
};
const show = async figure => {
  const chart = charts[figure.dataset.chart], box = figure.querySelector(".live");
  if (chart.box) return;
  chart.box = box;
  try {
    await (library ??= unpack());
    figure.classList.add("drawn"); // it is measured when it is drawn
    await chart.draw(box);
    Object.assign(chart, { redraw: () => chart.draw(box), drawnAt: performance.now() });
    figure.append(make("p", chart.hint, { className: "hint" }));
    if (chart !== charts.parallel) box.on("plotly_click", ({ points }) => { if (points[0].customdata !== undefined) select(points[0].customdata); });
  } catch (error) { // the picture stays
    console.warn(error);
    figure.classList.remove("drawn");
    figure.classList.contains("live-only") && figure.remove();
  }
};
const seen = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(({ target }) => {
  seen.unobserve(target);
  show(target);
}), { rootMargin: "200px" });
filter();
addEventListener("load", () => requestAnimationFrame(() => setTimeout(() => // what can be read is painted first
  document.querySelectorAll("figure[data-chart]").forEach(figure => seen.observe(figure)))));
DARK.addEventListener("change", () => Object.values(charts).forEach(chart => chart.redraw?.()));
