(function () {
  "use strict";
  var root = document.documentElement, plots = [], state = JSON.parse(document.getElementById("data").textContent);
  var printing = false;

  // Numbers for people.
  function binary(v, per) {
    if (v == null) return "–";
    var units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], i = 0, a = Math.abs(v);
    while (a >= 1024 && i < units.length - 1) { a /= 1024; v /= 1024; i++; }
    return +(a < 10 ? v.toFixed(2) : a < 100 ? v.toFixed(1) : v.toFixed(0)) + " " + units[i] + (per || "");
  }
  function perSecond(v) { return binary(v, "/s"); }
  function time(v) {
    if (v == null) return "–";
    if (v === 0) return "0";
    if (v < 1e-3) return +(v * 1e6).toFixed(0) + " µs";
    if (v < 1) return +(v * 1e3).toPrecision(3) + " ms";
    if (v < 120) return +v.toPrecision(3) + " s";
    var h = Math.floor(v / 3600), m = Math.floor(v % 3600 / 60), s = Math.round(v % 60);
    return (h ? h + " h " : "") + (m ? m + " min" : "") + (s && !h ? " " + s + " s" : "");
  }
  function number(v) { return v == null ? "–" : String(+v.toPrecision(3)); }
  function css(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }
  function faint(color, alpha) { // of #rrggbb
    var n = parseInt(color.slice(1), 16);
    return "rgba(" + (n >> 16) + "," + (n >> 8 & 255) + "," + (n & 255) + "," + alpha + ")";
  }
  function most(v) { var m = 0; for (var i = 0; i < v.length; i++) if (v[i] > m) m = v[i]; return m; }
  function tierColor(id) { return css(id.startsWith("gpu") ? "--gpu" : id.startsWith("host") ? "--host" : "--disk"); }

  // The runs that have a timeline, each with its seconds.
  function runs() {
    return state.runs.map(function (r, i) { return { i: i, name: r.name, t: r.timeline, limits: r.limits, peaks: r.peaks }; }).filter(function (r) { return r.t && r.t.waits.ended.length; });
  }
  function xs(t) { return t.waits.ended.map(function (_, i) { return Math.min((i + 0.5) * t.interval_seconds, Math.max(t.seconds, t.interval_seconds)); }); }
  var two = function () { return state.runs.length === 2; };
  function label(run, text) { return two() ? String.fromCharCode(65 + run.i) + " " + text : text; }
  function runColor(run) { return css(run.i ? "--b" : "--a"); }

  // align joins series of runs whose intervals differ on one axis.
  function align(parts) {
    if (parts.length === 1) return parts[0];
    return uPlot.join(parts);
  }
  function line(name, color, format, more) {
    return Object.assign({ label: name, stroke: color, width: 1.5, value: function (_, v) { return v == null ? "" : " " + format(v); }, spanGaps: true, points: { show: false } }, more || {});
  }
  function mark(name, color, format) { return line(name, color, format, { width: 1, dash: [5, 4] }); }

  // phases draws where the parts of the work begin.
  function phases(run) {
    return function (u) {
      var c = u.ctx, all = run.t.phases;
      if (two() || !all.length) return;
      c.save();
      c.font = 11 * devicePixelRatio + "px system-ui, sans-serif";
      var last = -1e9;
      all.forEach(function (p) {
        if (p.begin_seconds > u.scales.x.max || p.end_seconds < u.scales.x.min) return;
        var x = Math.round(u.valToPos(Math.max(p.begin_seconds, u.scales.x.min), "x", true)) + 0.5;
        c.strokeStyle = css("--line"); c.lineWidth = devicePixelRatio;
        c.beginPath(); c.moveTo(x, u.bbox.top); c.lineTo(x, u.bbox.top + u.bbox.height); c.stroke();
        var end = u.valToPos(Math.min(p.end_seconds, u.scales.x.max), "x", true), wide = c.measureText(p.name).width;
        if (x > last && end - x > wide + 6 * devicePixelRatio) {
          c.fillStyle = css("--soft"); c.textBaseline = "bottom"; c.textAlign = "left";
          c.fillText(p.name, x + 2 * devicePixelRatio, u.bbox.top - 7 * devicePixelRatio);
          last = x + wide;
        }
      });
      c.restore();
    };
  }

  var powers = [];
  for (var k = 0; k < 56; k++) powers.push(Math.pow(2, k));

  function axes(format, bytes) {
    var ink = css("--soft"), grid = { stroke: css("--grid"), width: 1 }, ticks = { stroke: css("--grid"), width: 1, size: 4 }, font = "11px system-ui, sans-serif";
    return [
      { stroke: ink, grid: { show: false }, ticks: ticks, font: font, size: 30, values: function (_, v) { return v.map(function (x) { return time(x); }); } },
      Object.assign({ stroke: ink, grid: grid, ticks: ticks, font: font, size: 68, values: function (_, v) { return v.map(function (x) { return format(x); }); } }, bytes ? { incrs: powers } : {}),
    ];
  }

  // plot makes a figure, or gives the one that is there new data.
  function plot(where, key, title, small, alt, make) {
    var holder = document.querySelector('[data-plots="' + where + '"]');
    if (!holder) return;
    var p = plots.find(function (o) { return o.where === where && o.key === key; });
    if (!p) {
      var fig = document.createElement("figure"), cap = document.createElement("figcaption"), hold = document.createElement("div");
      fig.className = "plot"; hold.className = "hold"; hold.setAttribute("role", "img");
      fig.append(cap, hold); holder.append(fig);
      p = { where: where, key: key, fig: fig, cap: cap, hold: hold };
      plots.push(p);
    }
    p.make = make;
    p.cap.textContent = title + " ";
    var s = document.createElement("small");
    s.textContent = small; p.cap.append(s);
    p.hold.setAttribute("aria-label", title + ": " + alt);
    var m = make(), shape = m.series.map(function (x) { return x.label; }).join("|") + JSON.stringify(m.scales);
    p.m = m;
    if (p.u && p.shape === shape) { p.u.setData(m.data); return; }
    p.shape = shape;
    draw(p, m);
  }
  function draw(p, m) {
    if (p.u) p.u.destroy();
    p.m = m = m || p.make();
    p.width = Math.max(200, Math.floor(p.hold.clientWidth));
    p.u = new uPlot({
      width: p.width, height: m.height || 190, padding: [22, 30, 0, 0], series: [{ label: "time", value: function (_, v) { return v == null ? "" : " " + time(v); } }].concat(m.series.slice(1)),
      axes: m.axes, scales: m.scales, bands: m.bands, hooks: { draw: [function (u) { p.m.over.forEach(function (f) { f(u); }); }] },
      cursor: { sync: { key: "time" }, points: { size: 5 }, y: false }, legend: { live: true, markers: { width: 2 } },
    }, m.data, p.hold);
  }

  function occupancy() {
    var all = runs(), ids = [];
    all.forEach(function (r) { r.t.spaces.forEach(function (s) { if (ids.indexOf(s.id) < 0) ids.push(s.id); }); });
    ids.slice(0, 24).forEach(function (id) {
      var of = all.map(function (r) { return { r: r, s: r.t.spaces.find(function (s) { return s.id === id; }) }; }).filter(function (o) { return o.s; });
      var first = of[0].s; // the books see each peak, and a look now and then does not
      var same = of.every(function (o) { return o.s.capacity_bytes === first.capacity_bytes; });
      var small = "at most " + of.map(function (o) {
        return label(o.r, binary(o.r.peaks[id] || most(o.s.used_bytes))) + (same ? "" : " of " + binary(o.s.capacity_bytes));
      }).join(", ") + (same ? " of " + binary(first.capacity_bytes) : "");
      plot("occupancy", id, id, small, small, function () {
        var series = [{ label: id }], parts = [], high = 0;
        of.forEach(function (o) {
          var x = xs(o.r.t), s = o.s, cols = [x], color = two() ? runColor(o.r) : tierColor(id);
          cols.push(s.used_bytes);
          series.push(line(label(o.r, "in use"), color, binary, { fill: faint(color, two() ? 0.08 : 0.2), width: 1.8 }));
          high = Math.max(high, most(s.used_bytes));
          [["copies_bytes", "copies", "--copy"], ["reserved_bytes", "reserved", "--held"], ["foreign_bytes", "others", "--calm"]].forEach(function (k) {
            if (two() || !most(s[k[0]])) return;
            high = Math.max(high, most(s[k[0]]));
            cols.push(s[k[0]]);
            series.push(line(label(o.r, k[1]), css(k[2]), binary, { width: 1.2 }));
          });
          parts.push(cols);
        });
        var data = align(parts), near = high > 0.25 * first.trigger_bytes;
        if (near) { // a disk that is nearly empty would be a line at the bottom
          [["trigger", first.trigger_bytes, "--mark"], ["stop", first.stop_bytes, "--calm"]].forEach(function (k) {
            series.push(mark(k[0], css(k[2]), binary));
            data = data.concat([data[0].map(function () { return k[1]; })]);
          });
        }
        return {
          data: data, series: series, axes: axes(binary, true), over: [phases(of[0].r)],
          scales: { x: { time: false }, y: { range: [0, near ? Math.max(first.capacity_bytes, high) : Math.max(high * 1.15, 1)] } },
        };
      });
    });
  }

  function edges() {
    var all = runs(), ways = {};
    all.forEach(function (r) {
      r.t.edges.forEach(function (e) {
        var name = e.from + " → " + e.to, sum = e.bytes.reduce(function (a, b) { return a + b; }, 0);
        ways[name] = (ways[name] || 0) + sum;
      });
    });
    var names = Object.keys(ways).filter(function (n) { return ways[n] > 0; });
    if (names.length > 12) names = names.sort(function (a, b) { return ways[b] - ways[a]; }).slice(0, 12).sort();
    names.forEach(function (name) {
      var of = all.map(function (r) { return { r: r, e: r.t.edges.find(function (e) { return e.from + " → " + e.to === name; }) }; }).filter(function (o) { return o.e; });
      var peak = Math.max.apply(null, of.map(function (o) { return most(o.e.bytes) / o.r.t.interval_seconds; }));
      var known = of.filter(function (o) { return o.r.limits[name]; }), far = function (v) { return v > 2.5 * peak; }; // then the curve would be flat
      var words = function (all) { // what is off the scale has its number in the plot
        var told = known.filter(function (o) { return all || !far(o.r.limits[name]); });
        return "at most " + perSecond(peak) + (told.length ? ", raw limit " + told.map(function (o) {
          return label(o.r, perSecond(o.r.limits[name])) + (far(o.r.limits[name]) ? " (off the scale)" : "");
        }).join(", ") : "");
      };
      plot("edges", name, name, words(false), words(true), function () {
        var series = [{ label: name }], high = 0, parts = [], limits = [];
        of.forEach(function (o) {
          var color = two() ? runColor(o.r) : tierColor(name.split(" → ")[1]);
          var v = o.e.bytes.map(function (b) { return b / o.r.t.interval_seconds; });
          high = Math.max(high, most(v));
          parts.push([xs(o.r.t), v]);
          series.push(line(label(o.r, "moved"), color, perSecond, { fill: faint(color, two() ? 0.08 : 0.22) }));
          if (o.r.limits[name]) limits.push([label(o.r, "raw limit"), o.r.limits[name], two() ? color : css("--mark")]);
        });
        var data = align(parts), above = [];
        limits.forEach(function (l) {
          if (far(l[1])) { above.push(l); return; }
          series.push(mark(l[0], l[2], perSecond));
          data = data.concat([data[0].map(function () { return l[1]; })]);
          high = Math.max(high, l[1]);
        });
        return { data: data, series: series, axes: axes(perSecond, true), over: [phases(of[0].r), beyond(above)], height: 160, scales: { x: { time: false }, y: { range: [0, Math.max(high * (1.1 + 0.14 * above.length), 1)] } } };
      });
    });
  }

  // beyond writes at the top edge the limits that lie above it, each as name, value and color.
  function beyond(limits) {
    return function (u) {
      var c = u.ctx, d = devicePixelRatio;
      c.save();
      c.font = 11 * d + "px system-ui, sans-serif"; c.textBaseline = "top"; c.textAlign = "right";
      limits.forEach(function (l, i) {
        c.fillStyle = l[2];
        c.fillText("↑ " + l[0] + " " + perSecond(l[1]), u.bbox.left + u.bbox.width - 4 * d, u.bbox.top + (3 + 15 * i) * d);
      });
      c.restore();
    };
  }

  function waits() {
    var all = runs();
    if (!all.length || !all.some(function (r) { return most(r.t.waits.total_seconds) > 0; })) return;
    var both = [["waiting", "Waiting at once", "requests, on average", function (r) { return r.t.waits.total_seconds.map(function (v) { return v / r.t.interval_seconds; }); }, number],
      ["longest", "The longest wait", "of those that ended at that time", function (r) { return r.t.waits.longest_seconds; }, time]];
    both.forEach(function (k) {
      var peak = Math.max.apply(null, all.map(function (r) { return most(k[3](r)); }));
      plot("waits", k[0], k[1], k[2], "at most " + k[4](peak), function () {
        var series = [{ label: k[0] }], parts = [], high = 0;
        all.forEach(function (r) {
          var v = k[3](r), color = two() ? runColor(r) : css("--held");
          high = Math.max(high, most(v));
          parts.push([xs(r.t), v]);
          series.push(line(label(r, k[0]), color, k[4], { fill: faint(color, 0.15) }));
        });
        return { data: align(parts), series: series, axes: axes(k[4]), over: [phases(all[0])], height: 160, scales: { x: { time: false }, y: { range: [0, high * 1.1 || 1] } } };
      });
    });
  }

  // causes draws a lane for each cause, whose cells are the darker the more was moved.
  function causes() {
    runs().forEach(function (r) {
      var order = ["trigger", "demand", "work", "ahead", "copy"], colors = { trigger: "--mark", demand: "--held", work: "--gpu", ahead: "--host", copy: "--copy" };
      var list = r.t.causes.slice().sort(function (a, b) { return (order.indexOf(a.name) + 99) % 99 - (order.indexOf(b.name) + 99) % 99; });
      if (!list.length) return;
      var alt = list.map(function (c) { return c.name + " " + c.moves.reduce(function (a, b) { return a + b; }, 0); }).join(", ");
      plot("causes", "causes" + r.i, label(r, "moves by cause"), "", alt + " moves", function () {
        var x = xs(r.t), height = 26 * list.length + 54;
        var series = [{ label: "cause" }], data = [x];
        list.forEach(function (c) {
          data.push(c.moves);
          series.push(line(c.name, css(colors[c.name] || "--calm"), function (v) { return v == null ? "–" : v + " moves"; }, { paths: function () { return null; }, scale: "lane" }));
        });
        var paint = function (u) {
          var c = u.ctx, lane = u.bbox.height / list.length, cell = Math.max(1, Math.abs(u.valToPos(r.t.interval_seconds, "x", true) - u.valToPos(0, "x", true)));
          c.save();
          c.beginPath(); c.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); c.clip();
          list.forEach(function (cause, i) {
            var v = cause.name === "copy" ? cause.moves : cause.bytes, high = most(v), top = u.bbox.top + i * lane;
            var color = css(colors[cause.name] || "--calm");
            c.fillStyle = faint(color, 0.08);
            c.fillRect(u.bbox.left, top + 3, u.bbox.width, lane - 6);
            for (var j = 0; j < v.length; j++) {
              if (!v[j]) continue;
              c.fillStyle = faint(color, 0.22 + 0.78 * Math.sqrt(v[j] / high));
              c.fillRect(u.valToPos(j * r.t.interval_seconds, "x", true), top + 3, cell + 0.6, lane - 6);
            }
          });
          c.restore();
          c.save();
          c.font = 12 * devicePixelRatio + "px system-ui, sans-serif"; c.textBaseline = "middle"; c.textAlign = "right"; c.fillStyle = css("--text");
          list.forEach(function (cause, i) { c.fillText(cause.name, u.bbox.left - 8 * devicePixelRatio, u.bbox.top + (i + 0.5) * lane); });
          c.restore();
        };
        var a = axes(number);
        a[1] = Object.assign(a[1], { scale: "lane", grid: { show: false }, ticks: { show: false }, values: function (_, v) { return v.map(function () { return ""; }); } });
        return { data: data, series: series, axes: a, over: [paint, phases(r)], height: height, scales: { x: { time: false, range: [0, Math.max(r.t.seconds, r.t.interval_seconds)] }, lane: { range: [0, 1] } } };
      });
    });
  }

  function tasks() {
    var all = runs().filter(function (r) { return most(r.t.tasks.running) > 0; });
    if (!all.length) return;
    plot("tasks", "tasks", "Tasks", "at once", "at most " + Math.max.apply(null, all.map(function (r) { return most(r.t.tasks.running); })), function () {
      var series = [{ label: "tasks" }], parts = [], high = 0;
      all.forEach(function (r) {
        var color = two() ? runColor(r) : css("--host");
        high = Math.max(high, most(r.t.tasks.running));
        parts.push([xs(r.t), r.t.tasks.running]);
        series.push(line(label(r, "running"), color, number, { fill: faint(color, 0.15) }));
      });
      return { data: align(parts), series: series, axes: axes(number), over: [phases(all[0])], height: 130, scales: { x: { time: false }, y: { range: [0, high * 1.15 || 1] } } };
    });
  }

  function all() { occupancy(); edges(); waits(); causes(); tasks(); }
  function again() { plots.forEach(function (p) { draw(p); }); }

  // The theme: as the system's, light, or dark. It is not stored: a file has no place of its own.
  var button = document.getElementById("theme"), modes = ["", "light", "dark"], names = ["as the system", "light", "dark"], mode = 0;
  button.hidden = false;
  button.addEventListener("click", function () {
    mode = (mode + 1) % 3;
    if (modes[mode]) root.dataset.theme = modes[mode]; else delete root.dataset.theme;
    button.querySelector("span").textContent = names[mode];
    again();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  var before;
  addEventListener("beforeprint", function () { printing = true; before = root.dataset.theme; root.dataset.theme = "light"; again(); });
  addEventListener("afterprint", function () { printing = false; if (before) root.dataset.theme = before; else delete root.dataset.theme; again(); });
  new ResizeObserver(function () {
    plots.forEach(function (p) {
      var w = Math.max(200, Math.floor(p.hold.clientWidth));
      if (p.u && w !== p.width) { p.width = w; p.u.setSize({ width: w, height: p.u.height }); }
    });
  }).observe(document.getElementById("main"));

  // A live page asks its own address for what is new, and changes only what differs.
  function refresh(next) {
    var fresh = new DOMParser().parseFromString("<main>" + next.main + "</main>", "text/html").querySelector("main"), main = document.getElementById("main");
    var keep = {};
    main.querySelectorAll("[data-plots]").forEach(function (e) { keep[e.dataset.plots] = e; });
    fresh.querySelectorAll("[data-plots]").forEach(function (e) { if (keep[e.dataset.plots]) e.replaceWith(keep[e.dataset.plots]); });
    main.replaceChildren.apply(main, Array.from(fresh.childNodes));
    state = next.data;
    plots = plots.filter(function (p) { return main.contains(p.fig); });
    all();
  }
  function poll() {
    var told = document.getElementById("live");
    told.hidden = false;
    if (!told.textContent) told.textContent = "live";
    fetch("?data", { cache: "no-store" }).then(function (r) {
      if (!r.ok) throw new Error(r.status);
      return r.json();
    }).then(function (next) {
      told.classList.remove("late");
      var word = next.data.live ? "live" : "ended";
      if (told.textContent !== word) told.textContent = word;
      if (!printing && !getSelection().toString()) refresh(next);
      if (next.data.live) setTimeout(poll, 1000);
    }).catch(function () {
      told.classList.add("late");
      told.textContent = "no answer: this is the last that came";
      setTimeout(poll, 3000);
    });
  }

  all();
  if (state.live) setTimeout(poll, 1000);
  root.dataset.ready = plots.length;
})();
