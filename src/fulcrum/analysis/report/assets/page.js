// The page's own script: draws the charts (Observable Plot), sorts and filters tables, follows a run that goes on.
// Everything on the page is also there without it, but for the charts. It loads nothing but, under `fulcrum watch`,
// the page's own next state.
"use strict";
(() => {
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const chosen = { axis: {}, tab: {}, layer: {}, hidden: {}, sort: {}, search: {}, open: {}, ticked: new Set() };
  let data = null;

  const root = document.documentElement;
  const el = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "onclick" || key === "onchange") made[key] = value;
      else if (value === true) made.setAttribute(key, "");
      else if (value !== null && value !== false && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  };
  const colourOf = (index) => (index < 0 ? "var(--soft)" : `var(--c${index % 8})`);
  const dashOf = (series) => (series.dash ? "5 4" : DASHES[Math.floor(Math.max(series.colour, 0) / 8) % DASHES.length]);

  // --- numbers as people read them -------------------------------------------------------------------
  const digits = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };
  const digitsUp = (value) => { // an epsilon: never less than what was spent
    const near = Number(value.toPrecision(4));
    return digits(near >= value ? near : near + 10 ** (Math.floor(Math.log10(Math.abs(value))) - 3));
  };
  const percent = (value) => `${Number((100 * value).toPrecision(3))}%`;
  const shown = (axis, value) => (axis.percent ? (axis.log ? percent(value) : `${(100 * value).toFixed(1)}%`) : axis.up ? digitsUp(value) : digits(value));

  // --- charts -------------------------------------------------------------------------------------------
  const array = (index) => data.arrays[index];
  const pointsOf = (series, key) => {
    const x = array(series.x[key]), y = array(series.y);
    const low = series.low === undefined ? null : array(series.low), high = low ? array(series.high) : null;
    const found = [];
    for (let i = 0; i < y.length; i++)
      if (x[i] !== null && y[i] !== null)
        found.push({ x: x[i], y: y[i], low: low ? low[i] : null, high: high ? high[i] : null, name: series.name });
    return found;
  };

  function drawLines(chart, width, key) {
    const xAxis = chart.x[key], layer = layerOf(chart), hidden = hiddenOf(chart);
    const drawn = chart.series.filter((each) => each.layer === layer && !hidden.has(each.name) && each.x[key] !== undefined);
    const dots = chart.kind === "dots";
    const marks = [];
    const all = [];
    for (const series of drawn) {
      const points = pointsOf(series, key).filter((p) => (!xAxis.log || p.x > 0) && (!chart.y.log || p.y > 0));
      const colour = colourOf(series.colour);
      all.push(...points.map((p) => ({ ...p, series })));
      if (series.low !== undefined)
        marks.push(Plot.areaY(points.filter((p) => p.low !== null), { x: "x", y1: "low", y2: "high", fill: colour, fillOpacity: series.dash ? 0.08 : 0.16 }));
      if (points.length === 1 || (dots && series.colour >= 0))
        marks.push(Plot.dot(points, { x: "x", y: "y", r: dots ? 6 : 3.5, fill: colour, stroke: "var(--card)", strokeWidth: 1.5 }));
      else if (!(series.low !== undefined && series.dash))
        marks.push(Plot.line(points, { x: "x", y: "y", stroke: colour, strokeWidth: dots ? 1.6 : 2, strokeDasharray: dashOf(series), curve: dots ? "step-after" : "linear" }));
    }
    if (dots && drawn.length <= 16)
      marks.push(Plot.text(all.filter((p) => p.series.names), { x: "x", y: "y", text: "name", dy: -13, fill: "var(--ink)", stroke: "var(--card)", strokeWidth: 3, fontSize: 11 }));
    for (const [name, value] of chart.levels) {
      if (chart.y.log && value <= 0) continue;
      marks.push(Plot.ruleY([value], { stroke: "var(--soft)", strokeDasharray: "2 3" }));
      marks.push(Plot.text([[0, value]], { frameAnchor: "right", x: null, y: value, text: () => name, textAnchor: "end", dy: -7, fill: "var(--soft)", fontSize: 11 }));
    }
    const unit = xAxis.label === "round" || key === "rank" ? xAxis.label : xAxis.label.replace(" spent", "");
    marks.push(Plot.tip(all, (dots ? Plot.pointer : Plot.pointerX)({
      x: "x", y: "y", maxRadius: 60, fill: "var(--card)", stroke: "var(--line)",
      title: (p) => `${p.name}\n${unit} ${shown(xAxis, p.x)}\n${chart.y.label} ${shown(chart.y, p.y)}` + (p.low !== null && p.low !== p.high ? `\n${shown(chart.y, p.low)} to ${shown(chart.y, p.high)}` : ""),
    })));
    return Plot.plot({
      width, height: Math.round(Math.min(340, Math.max(220, width * 0.58))), marginLeft: 52, marginRight: 14, marginTop: 28, marginBottom: 40,
      style: { background: "none", color: "var(--ink)", fontSize: "12px" },
      x: { type: xAxis.log ? "log" : "linear", label: xAxis.label, grid: false, ticks: Math.max(3, Math.round(width / 90)), nice: dots, tickFormat: xAxis.percent ? percent : xAxis.log || dots ? (v) => digits(v) : undefined, labelArrow: "none", insetLeft: dots ? 14 : 0, insetRight: dots ? 14 : 0 },
      y: { type: chart.y.log ? "log" : "linear", label: chart.y.label, grid: true, ticks: 5, nice: !chart.y.log, zero: chart.y.zero, labelArrow: "none", tickFormat: chart.y.percent ? (v) => `${Number((100 * v).toPrecision(6))}%` : (v) => digits(v) },
      marks,
    });
  }

  function drawBars(chart, width) {
    const [series] = chart.series;
    const rows = array(series.y).map((value, i) => ({ value, name: series.names[i] }));
    const longest = Math.min(Math.max(...rows.map((row) => row.name.length)), 22);
    const cut = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);
    const marks = [
      Plot.barX(rows, { x: "value", y: (row, i) => i, fill: colourOf(series.colour), insetTop: 2, insetBottom: 2, rx: 2, title: (row) => `${row.name}: ${shown(chart.y, row.value)}` }),
      Plot.text(rows, { x: "value", y: (row, i) => i, text: (row) => shown(chart.y, row.value), textAnchor: "start", dx: 5, fill: "var(--soft)", fontSize: 11 }),
    ];
    for (const [name, value] of chart.levels)
      marks.push(Plot.ruleX([value], { stroke: "var(--ink)", strokeDasharray: "2 3" }), Plot.text([value], { x: value, frameAnchor: "top", dy: -12, text: () => name, fill: "var(--soft)", fontSize: 11 }));
    return Plot.plot({
      width, height: 50 + 24 * rows.length, marginLeft: 14 + 6.6 * longest, marginRight: 52, marginTop: 22, marginBottom: 34,
      style: { background: "none", color: "var(--ink)", fontSize: "12px" },
      x: { label: chart.y.label, labelArrow: "none", grid: true, zero: true, ticks: Math.max(3, Math.round(width / 110)), tickFormat: chart.y.percent ? (v) => `${Number((100 * v).toPrecision(6))}%` : (v) => digits(v) },
      y: { type: "band", label: null, tickFormat: (i) => cut(rows[i].name), tickSize: 0, domain: rows.map((_, i) => i) },
      marks,
    });
  }

  function drawHeat(chart, width) {
    const cells = chart.cells.flatMap((row, i) => row.map((value, j) => ({ value, i, j })));
    const most = Math.max(...cells.map((each) => each.value ?? 0), 1e-9);
    const longest = Math.min(Math.max(...chart.rows.map((name) => name.length)), 22);
    const side = (width - 20 - 6.6 * longest) / chart.columns.length;
    return Plot.plot({
      width, height: 56 + chart.rows.length * Math.max(18, Math.min(30, side)), marginLeft: 16 + 6.6 * longest, marginRight: 6, marginTop: 8, marginBottom: 36,
      style: { background: "none", color: "var(--ink)", fontSize: "12px" },
      x: { type: "band", label: "class", labelArrow: "none", tickSize: 0, domain: chart.columns.map((_, j) => j), tickFormat: (j) => chart.columns[j] },
      y: { type: "band", label: null, tickSize: 0, domain: chart.rows.map((_, i) => i), tickFormat: (i) => (chart.rows[i].length > 22 ? `${chart.rows[i].slice(0, 21)}…` : chart.rows[i]) },
      marks: [
        Plot.cell(cells, { x: "j", y: "i", fill: "var(--c0)", fillOpacity: (d) => 0.04 + 0.92 * ((d.value ?? 0) / most), inset: 1, rx: 2, title: (d) => `${chart.rows[d.i]}, class ${chart.columns[d.j]}: ${shown(chart.y, d.value)}` }),
        side > 30 ? Plot.text(cells, { x: "j", y: "i", text: (d) => (d.value >= 0.005 ? Math.round(100 * d.value) : ""), fill: (d) => (d.value > 0.6 * most ? "var(--card)" : "var(--ink)"), fontSize: 11 }) : null,
      ],
    });
  }

  const layersOf = (chart) => [...new Set(chart.series.map((each) => each.layer))];
  const layerOf = (chart) => {
    const layers = layersOf(chart), wanted = chosen.layer.all;
    return layers.includes(wanted) ? wanted : layers[0];
  };
  const hiddenOf = (chart) => (chosen.hidden[chart.key] ??= new Set());

  function makeLegend(chart, redraw) {
    const layer = layerOf(chart), list = el("ul", { class: "legend" });
    const seen = chart.series.filter((each) => each.layer === layer && each.name && each.colour >= 0);
    if (seen.length < 2) return list;
    for (const series of seen) {
      const key = el("span", { class: `key${dashOf(series) ? " dash" : ""}` });
      key.style.borderTopColor = colourOf(series.colour);
      const hidden = hiddenOf(chart);
      list.append(el("li", {}, el("button", {
        type: "button", "aria-pressed": String(!hidden.has(series.name)),
        onclick: () => { hidden.has(series.name) ? hidden.delete(series.name) : hidden.add(series.name); redraw(); },
      }, key, series.name)));
    }
    return list;
  }

  function press(label, on, onclick) {
    return el("button", { type: "button", "aria-pressed": String(on), onclick }, label);
  }

  function drawFigure(figure) {
    const charts = data.charts.filter((chart) => (chart.group || chart.key) === figure.dataset.group);
    if (!charts.length) { figure.hidden = true; return; }
    const group = figure.dataset.group, held = document.activeElement;
    const focus = figure.contains(held) ? [...figure.querySelectorAll("button, select")].indexOf(held) : -1;
    const redraw = () => drawFigure(figure);
    const chart = charts.find((each) => each.key === chosen.tab[group]) ?? charts[0];
    const keys = Object.keys(chart.x), key = keys.includes(chosen.axis[group]) ? chosen.axis[group] : keys[0];
    const tools = el("div", { class: "tools" });
    if (charts.length > 4) {
      const select = el("select", { "aria-label": "what is shown", onchange: () => { chosen.tab[group] = select.value; redraw(); } });
      for (const each of charts) select.append(el("option", { value: each.key, selected: each === chart }, each.title));
      tools.append(select);
    } else if (charts.length > 1)
      for (const each of charts) tools.append(press(each.title, each === chart, () => { chosen.tab[group] = each.key; redraw(); }));
    if (keys.length > 1) {
      const axes = el("span", { class: "axes", role: "group", "aria-label": "horizontal axis" });
      for (const each of keys) axes.append(press(`over ${each === "round" ? "rounds" : "epsilon"}`, each === key, () => { chosen.axis[group] = each; redraw(); }));
      tools.append(axes);
    }
    const width = Math.max(260, Math.floor(figure.clientWidth || 480));
    const draw = chart.kind === "bars" ? drawBars : chart.kind === "heat" ? drawHeat : drawLines;
    const svg = draw(chart, width, key);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${chart.title}. ${chart.said}`);
    svg.removeAttribute("width"); svg.removeAttribute("height");
    const save = el("div", { class: "tools noprint" },
      ...["SVG", "PNG", "CSV"].map((kind) => el("button", { type: "button", class: "quiet", "aria-label": `save ${chart.title} as ${kind}`, onclick: () => SAVERS[kind](chart, svg) }, kind)));
    figure.replaceChildren(
      el("div", { class: "head" }, el("h3", {}, chart.title), save), tools, svg, makeLegend(chart, redraw),
      el("figcaption", {}, chart.caption));
    if (focus >= 0) [...figure.querySelectorAll("button, select")][focus]?.focus();
  }

  // --- files from charts ------------------------------------------------------------------------------------
  function download(name, blob) {
    const link = el("a", { href: URL.createObjectURL(blob), download: name });
    document.body.append(link); link.click(); link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 4000);
  }
  function standalone(svg) {
    // Styles that the page decides (colours by theme) are written into a copy, so that the file looks the same anywhere.
    const copy = svg.cloneNode(true), from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((node, i) => {
      const style = getComputedStyle(node);
      for (const name of ["fill", "stroke", "color"]) if ((node.getAttribute(name) ?? "").includes("var(") || name === "color") to[i].setAttribute(name, style[name]);
    });
    const [, , w, h] = svg.getAttribute("viewBox").split(" ");
    copy.removeAttribute("style");
    copy.setAttribute("width", w); copy.setAttribute("height", h); copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("font-family", "sans-serif"); copy.setAttribute("font-size", "12");
    const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    back.setAttribute("width", "100%"); back.setAttribute("height", "100%"); back.setAttribute("fill", getComputedStyle(document.body).getPropertyValue("--card"));
    copy.prepend(back);
    return { text: new XMLSerializer().serializeToString(copy), w: Number(w), h: Number(h) };
  }
  const SAVERS = {
    SVG: (chart, svg) => download(`${chart.key}.svg`, new Blob([standalone(svg).text], { type: "image/svg+xml" })),
    PNG: (chart, svg) => {
      const { text, w, h } = standalone(svg), image = new Image();
      image.onload = () => {
        const canvas = el("canvas", { width: 2 * w, height: 2 * h });
        canvas.getContext("2d").drawImage(image, 0, 0, 2 * w, 2 * h);
        canvas.toBlob((blob) => download(`${chart.key}.png`, blob));
      };
      image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    },
    CSV: (chart) => download(`${chart.key}.csv`, new Blob([chartToCsv(chart)], { type: "text/csv" })),
  };
  const cell = (value) => {
    if (typeof value === "number") return String(value);
    const text = String(value ?? ""), guarded = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(guarded) ? `"${guarded.replaceAll('"', '""')}"` : guarded;
  };
  function chartToCsv(chart) {
    const lines = [];
    if (chart.kind === "heat") {
      lines.push(["", ...chart.columns]);
      chart.cells.forEach((row, i) => lines.push([chart.rows[i], ...row]));
    } else {
      const keys = Object.keys(chart.x);
      lines.push(["series", "layer", ...(chart.kind === "bars" ? ["name"] : keys), chart.y.label, "low", "high"]);
      for (const series of chart.series)
        array(series.y).forEach((value, i) => lines.push([series.name, series.layer,
          ...(chart.kind === "bars" ? [series.names[i]] : keys.map((key) => (series.x[key] === undefined ? "" : array(series.x[key])[i]))), value,
          series.low === undefined ? "" : array(series.low)[i], series.high === undefined ? "" : array(series.high)[i]]));
    }
    return lines.map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
  }

  // --- tables -----------------------------------------------------------------------------------------------
  function sortTable(table, column, direction) {
    const body = table.tBodies[0], value = (row) => {
      const held = row.cells[column], key = held.dataset.sort ?? held.textContent.trim();
      return key === "" ? null : Number.isNaN(Number(key)) ? key : Number(key);
    };
    const rows = [...body.rows];
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null); // what is missing stands last, either way
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
      return direction * order;
    });
    body.append(...rows);
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }
  function mountTables(scope) {
    for (const table of scope.querySelectorAll("table.sortable")) {
      const id = table.caption.textContent;
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        head.querySelector("button.sort").onclick = () => {
          const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
          chosen.sort[id] = [column, direction];
          sortTable(table, column, direction);
        };
      });
      if (chosen.sort[id]) sortTable(table, ...chosen.sort[id]);
    }
    for (const input of scope.querySelectorAll("input[data-filter]")) {
      const rows = [...document.getElementById(input.dataset.filter).querySelectorAll("tbody tr")];
      const apply = () => {
        chosen.search[input.dataset.filter] = input.value;
        const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        let seen = 0;
        for (const row of rows) {
          row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
          seen += !row.hidden;
        }
        const count = document.getElementById(`${input.dataset.filter}-count`);
        if (count) count.textContent = `${seen} of ${rows.length}`;
      };
      input.value = chosen.search[input.dataset.filter] ?? input.value;
      input.oninput = apply;
      apply();
    }
    const compare = scope.querySelector("[data-compare]");
    if (compare) {
      const boxes = [...scope.querySelectorAll("input[data-run]")];
      const show = () => {
        compare.disabled = chosen.ticked.size < 1;
        compare.textContent = chosen.ticked.size > 1 ? `Compare ${chosen.ticked.size} runs` : "Compare ticked runs";
      };
      for (const box of boxes) {
        box.checked = chosen.ticked.has(box.dataset.run);
        box.onchange = () => { box.checked ? chosen.ticked.add(box.dataset.run) : chosen.ticked.delete(box.dataset.run); show(); };
      }
      compare.onclick = () => {
        const wanted = new URLSearchParams(location.search);
        wanted.delete("run");
        for (const run of chosen.ticked) wanted.append("run", run);
        location.search = wanted.toString();
      };
      show();
    }
  }

  // --- the page -----------------------------------------------------------------------------------------------
  function mount() {
    const main = document.querySelector("main");
    data = JSON.parse(document.getElementById("data").textContent);
    for (const figure of main.querySelectorAll("figure.chart")) drawFigure(figure);
    mountTables(main);
    for (const details of main.querySelectorAll("details[id]")) {
      if (chosen.open[details.id] !== undefined) details.open = chosen.open[details.id];
      details.ontoggle = () => { chosen.open[details.id] = details.open; };
    }
    const layers = main.querySelector("[data-layers]");
    if (layers) {
      const buttons = [["runs", "each run"], ["seeds", "means over seeds"]].map(([name, words]) =>
        press(words, (chosen.layer.all ?? "runs") === name, () => { chosen.layer.all = name; mount(); }));
      layers.replaceChildren(...buttons);
    }
    for (const button of main.querySelectorAll("button[data-copy]"))
      button.onclick = async () => {
        const text = document.getElementById(button.dataset.copy).textContent;
        try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(document.getElementById(button.dataset.copy)); }
      };
    for (const time of main.querySelectorAll("time[data-ago]")) time.textContent = ago(Number(time.dataset.ago));
  }
  function ago(then) {
    const seconds = Math.max(0, Date.now() / 1000 - then);
    for (const [size, word] of [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]])
      if (seconds >= size) { const n = Math.floor(seconds / size); return `${n} ${word}${n > 1 ? "s" : ""} ago`; }
    return "now";
  }

  const theme = document.querySelector("button.theme");
  const themes = ["auto", "light", "dark"];
  let current = 0;
  theme.onclick = () => {
    current = (current + 1) % 3;
    if (current) root.dataset.theme = themes[current]; else delete root.dataset.theme;
    theme.textContent = `theme: ${themes[current]}`;
  };

  let timer = null, drawnAt = innerWidth;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (innerWidth === drawnAt) return; // on phones, scrolling changes the height alone
      drawnAt = innerWidth;
      for (const figure of document.querySelectorAll("figure.chart")) drawFigure(figure);
    }, 120);
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));

  // --- live: the page's next state, under `fulcrum watch` ---------------------------------------------------------
  const live = document.querySelector("meta[name='fulcrum-live']");
  async function follow() {
    const words = document.getElementById("live");
    let state = live.content;
    for (;;) {
      await new Promise((done) => setTimeout(done, Number(live.dataset.seconds) * 1000));
      try {
        const wanted = new URL(location.href);
        wanted.searchParams.set("state", state);
        wanted.hash = "";
        const answer = await fetch(wanted, { cache: "no-store", headers: { accept: "text/html" } });
        if (answer.status === 204) { words.className = "live"; words.textContent = "live"; mountTimes(); continue; }
        if (!answer.ok) throw new Error(String(answer.status));
        const next = new DOMParser().parseFromString(await answer.text(), "text/html");
        state = next.querySelector("meta[name='fulcrum-live']").content;
        const active = document.activeElement, place = active && active.dataset ? active.dataset.filter : undefined;
        document.querySelector("main").replaceWith(next.querySelector("main"));
        document.querySelector("header.top > div").replaceWith(next.querySelector("header.top > div"));
        document.title = next.title;
        mount();
        if (place) { const input = document.querySelector(`input[data-filter="${CSS.escape(place)}"]`); input?.focus(); input?.setSelectionRange(input.value.length, input.value.length); }
        words.className = "live"; words.textContent = "live";
      } catch { words.className = "live off"; words.textContent = "the server does not answer"; }
    }
  }
  function mountTimes() { for (const time of document.querySelectorAll("time[data-ago]")) time.textContent = ago(Number(time.dataset.ago)); }

  mount();
  if (live) follow();
  root.dataset.ready = "1";
})();
