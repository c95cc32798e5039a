// Draws the charts of core/charts.py: <mst-chart> is drawn when it comes into a page, however it comes there.
import uPlot from "./vendor/uplot.js";

const COUNTED = ["requests", "tokens"];
const CLICK_MS = 250; // a second click in that time makes it a double click
const DAY_S = 86400;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]]; // not by colour alone
// Whole numbers of what is counted: there is no half request. Of memory, whole powers of two.
const WHOLE = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
// Seconds between two labels of the time axis; never less than a step, or a day would have two labels.
const TIME_INCREMENTS = [1, 5, 15, 30, 60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000];
const INCREMENTS = { requests: WHOLE, tokens: WHOLE, MiB: [...Array(40).keys()].map((power) => 2 ** power) };
const language = document.documentElement.lang || "en";
const zoned = (options) => new Intl.DateTimeFormat(language, { timeZone: "UTC", hourCycle: "h23", ...options });
const clock = zoned({ hour: "2-digit", minute: "2-digit" });
const day = zoned({ day: "numeric", month: "short" });
const whole = zoned({ dateStyle: "medium", timeStyle: "short" });
const wholeDay = zoned({ dateStyle: "medium" });

const printNumber = (value) => {
    const places = Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
    return value.toLocaleString(language, { minimumFractionDigits: places, maximumFractionDigits: places });
};
// As core.charts.print_value does.
const printValue = (value, unit) => {
    if (value === null || value === undefined) {
        return "–";
    }
    const [shown, sign] =
        unit === "ms" && Math.abs(value) >= 1000
            ? [value / 1000, "s"]
            : unit === "MiB" && Math.abs(value) >= 1024
              ? [value / 1024, "GiB"]
              : [value, COUNTED.includes(unit) ? "" : unit];
    return sign ? `${printNumber(shown)}\u00a0${sign}` : printNumber(shown);
};
const compact = new Intl.NumberFormat(language, { notation: "compact", maximumFractionDigits: 1 });
const printTick = (value, unit) => (COUNTED.includes(unit) || unit === "" || value === 0 ? compact.format(value) : printValue(value, unit));

const fill = (address, data, index) =>
    address.replace("{since}", data.starts[index]).replace("{until}", data.starts[index] + data.step_s);

class MusterChart extends HTMLElement {
    #data = null;
    #plot = null;
    #isZoomed = false;
    #hidden = new Set();
    #tip = null;
    #watchers = [];

    connectedCallback() {
        this.#data = JSON.parse(this.querySelector("script[type='application/json']").textContent);
        const area = this.#find(".mst-plot-area");
        this.#find(".mst-plot-reset").addEventListener("click", () => this.#showAll());
        this.#find("details").addEventListener("toggle", () => this.#fillTable());
        this.#buttons().forEach((button, index) => button.addEventListener("click", () => this.#turn(button, index)));
        const sized = new ResizeObserver(() => this.#resize());
        sized.observe(area);
        const themed = new MutationObserver(() => this.#plot?.redraw());
        themed.observe(document.documentElement, { attributeFilter: ["class"] });
        this.#watchers = [sized, themed];
    }

    disconnectedCallback() {
        this.#watchers.forEach((watcher) => watcher.disconnect());
        this.#plot?.destroy();
        this.#plot = null;
    }

    // Shows newer data: of the same lines without losing zoom, hover and what is switched off.
    show(data) {
        const isSame = JSON.stringify(data.lines.map((line) => line.label)) === JSON.stringify(this.#data.lines.map((line) => line.label));
        this.#data = data;
        this.#find(".mst-plot-empty").hidden = !data.is_empty;
        this.#find(".mst-plot-drawn").hidden = data.is_empty;
        this.#find(".mst-plot-area").setAttribute("aria-label", data.summary);
        if (!isSame) {
            this.#makeLegend();
        }
        if (this.#plot && isSame) {
            this.#plot.setData(this.#columns(), false);
            this.#rescale();
        } else {
            this.#draw();
        }
        this.#fillTable();
    }

    #find(selector) {
        return this.querySelector(selector);
    }

    #buttons() {
        return [...this.querySelectorAll(".mst-plot-legend button")];
    }

    #makeLegend() {
        this.#hidden.clear();
        this.#find(".mst-plot-legend").replaceChildren(
            ...this.#data.lines.map((line, index) => {
                const item = document.createElement("li");
                const button = document.createElement("button");
                button.type = "button";
                button.setAttribute("aria-pressed", "true");
                button.append(makeMark(line), line.label);
                button.addEventListener("click", () => this.#turn(button, index));
                item.append(button);
                return item;
            }),
        );
    }

    #turn(button, index) {
        const isShown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isShown));
        this.#hidden[isShown ? "delete" : "add"](index);
        if (this.#plot) {
            this.#plot.setSeries(this.#place(index), { show: isShown });
            this.#plot.setData(this.#columns(), false);
            this.#rescale();
        }
    }

    // Stacked lines are drawn from the highest to the lowest, each over the one that holds it.
    #place(index) {
        return this.#data.is_stacked ? this.#data.lines.length - index : index + 1;
    }

    #columns() {
        const { starts, lines, is_stacked: isStacked } = this.#data;
        if (!isStacked) {
            return [starts, ...lines.map((line) => line.values)];
        }
        const sums = starts.map(() => null);
        const stacked = lines.map((line, index) =>
            line.values.map((value, at) => {
                if (value !== null && !this.#hidden.has(index)) {
                    sums[at] = (sums[at] ?? 0) + value;
                }
                return sums[at];
            }),
        );
        return [starts, ...stacked.reverse()];
    }

    #wholeTime() {
        const { starts, step_s: step, kind } = this.#data;
        const last = starts[starts.length - 1];
        return { min: starts[0], max: kind === "bars" || starts.length === 1 ? last + step : last };
    }

    #rescale() {
        if (this.#isZoomed) {
            this.#plot.redraw(true, true);
            const { min, max } = this.#plot.scales.x;
            this.#plot.setScale("x", { min, max });
        } else {
            this.#plot.setScale("x", this.#wholeTime());
        }
    }

    #showAll() {
        this.#isZoomed = false;
        const reset = this.#find(".mst-plot-reset");
        if (document.activeElement === reset) {
            this.#buttons()[0]?.focus(); // what is hidden loses the focus to nowhere
        }
        reset.hidden = true;
        this.#plot?.setScale("x", this.#wholeTime());
    }

    #resize() {
        const area = this.#find(".mst-plot-area");
        if (!area.clientWidth) {
            return; // in a tab that nobody looks at
        }
        if (this.#plot) {
            this.#plot.setSize({ width: area.clientWidth, height: area.clientHeight });
        } else if (!this.#data.is_empty) {
            this.#draw();
        }
    }

    #draw() {
        this.#plot?.destroy();
        this.#plot = null;
        const area = this.#find(".mst-plot-area");
        if (!this.#data.starts.length || !area.clientWidth) {
            return;
        }
        this.#tip?.remove();
        this.#tip = document.createElement("div");
        this.#tip.className = "mst-plot-tip";
        this.#tip.hidden = true;
        this.#isZoomed = false;
        this.#find(".mst-plot-reset").hidden = true;
        area.classList.toggle("mst-plot-is-link", Boolean(this.#data.link));
        this.#plot = new uPlot(this.#options(area), this.#columns(), area);
        this.#plot.over.append(this.#tip);
        this.#plot.setScale("x", this.#wholeTime());
        this.#listen(this.#plot.over);
    }

    #options(area) {
        const { lines, unit, step_s: step } = this.#data;
        const read = (name) => getComputedStyle(this).getPropertyValue(name).trim();
        const font = `11px ${getComputedStyle(this).fontFamily}`;
        const common = { font, stroke: () => read("--mst-soft"), ticks: { show: false } };
        const grid = { stroke: () => read("--mst-line"), width: 1 };
        const series = lines.map((line, index) => this.#series(line, index, read));
        return {
            width: area.clientWidth,
            height: area.clientHeight,
            tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
            legend: { show: false },
            padding: [8, 24, 0, 0],
            series: [{}, ...(this.#data.is_stacked ? series.reverse() : series)],
            scales: {
                x: { time: true, range: (plot, min, max) => [min, max] },
                y: { range: (plot, min, max) => this.#spread(min, max) },
            },
            axes: [
                {
                    ...common,
                    grid: { ...grid, show: false },
                    size: 36,
                    space: 60,
                    incrs: TIME_INCREMENTS.filter((seconds) => seconds >= step),
                    values: (plot, splits, axis, space, every) => printTimes(splits, Math.max(every, step)),
                },
                {
                    ...common,
                    grid,
                    space: 34,
                    incrs: INCREMENTS[unit],
                    size: (plot, values) => Math.max(36, 14 + 6.5 * Math.max(0, ...(values ?? []).map((text) => text.length))),
                    values: (plot, splits) => splits.map((value) => printTick(value, unit)),
                },
            ],
            cursor: { y: false, drag: { x: true, y: false, setScale: true }, points: { show: this.#data.kind !== "bars", size: 7 } },
            hooks: { setCursor: [(plot) => this.#hover(plot)], setSelect: [() => this.#zoomed()] },
        };
    }

    #series(line, index, read) {
        const colour = () => read(`--mst-line-${line.colour}`);
        const isFilled = this.#data.kind !== "lines";
        return {
            label: line.label,
            show: !this.#hidden.has(index),
            stroke: colour,
            fill: isFilled ? colour : undefined,
            alpha: isFilled && !this.#data.is_stacked && this.#data.kind === "areas" ? 0.6 : 1,
            width: this.#data.kind === "bars" ? 0 : 1.75,
            dash: isFilled ? undefined : DASHES[index % DASHES.length],
            paths: this.#data.kind === "bars" ? uPlot.paths.bars({ size: [0.85, 60], align: 1 }) : undefined,
            points: { show: false, size: 4, fill: colour, filter: (plot, at) => (this.#data.kind === "bars" ? null : listAlone(plot.data[at])) },
            spanGaps: false,
        };
    }

    #spread(min, max) {
        const { unit } = this.#data;
        if (max === null || max <= 0) {
            return [0, unit === "%" ? 100 : 1];
        }
        const room = max * 1.08;
        return [Math.min(0, min ?? 0), unit === "%" ? Math.min(100, Math.max(room, 1)) : COUNTED.includes(unit) ? Math.max(room, 4) : room];
    }

    #zoomed() {
        const { left, width } = this.#plot.select;
        if (width > 0 && left >= 0) {
            this.#isZoomed = true;
            this.#find(".mst-plot-reset").hidden = false;
        }
    }

    #listen(over) {
        let waiting = 0;
        over.addEventListener("dblclick", () => {
            clearTimeout(waiting);
            this.#showAll();
        });
        over.addEventListener("click", () => {
            const index = this.#stepAt(this.#plot, this.#plot.cursor.left);
            clearTimeout(waiting);
            if (this.#data.link && index !== null) {
                waiting = setTimeout(() => location.assign(fill(this.#data.link, this.#data, index)), CLICK_MS);
            }
        });
        over.addEventListener("mouseleave", () => (this.#tip.hidden = true));
    }

    #hover(plot) {
        const { left, top } = plot.cursor;
        const index = this.#stepAt(plot, left);
        if (index === null) {
            this.#tip.hidden = true;
            return;
        }
        const { lines, unit } = this.#data;
        const list = document.createElement("dl");
        lines.forEach((line, at) => {
            if (!this.#hidden.has(at)) {
                const name = document.createElement("dt");
                name.append(makeMark(line), line.label);
                const value = document.createElement("dd");
                value.textContent = printValue(line.values[index], unit);
                list.append(name, value);
            }
        });
        const time = document.createElement("strong");
        time.textContent = this.#printStep(index);
        this.#tip.replaceChildren(time, list);
        this.#tip.hidden = false;
        const isRight = left > plot.over.clientWidth / 2;
        const x = isRight ? left - this.#tip.offsetWidth - 12 : left + 12;
        const y = Math.max(0, Math.min(top - this.#tip.offsetHeight / 2, plot.over.clientHeight - this.#tip.offsetHeight));
        this.#tip.style.transform = `translate(${Math.max(x, -40)}px, ${y}px)`;
    }

    // A bar stands to the right of its time: the nearest time may be that of the next one.
    #stepAt(plot, left) {
        if (left === null || left < 0) {
            return null;
        }
        const { starts, kind } = this.#data;
        if (kind !== "bars") {
            return plot.cursor.idx ?? null;
        }
        const at = plot.posToVal(left, "x");
        const index = starts.findLastIndex((start) => start <= at);
        return index < 0 ? null : index;
    }

    #printStep(index) {
        const { starts, step_s: step } = this.#data;
        const at = new Date(starts[index] * 1000);
        return step >= DAY_S ? wholeDay.format(at) : `${whole.format(at)} UTC`;
    }

    #fillTable() {
        const place = this.#find(".mst-plot-table");
        if (!this.#find("details").open) {
            place.replaceChildren();
            return;
        }
        const { lines, starts, unit, link } = this.#data;
        const table = document.createElement("table");
        const head = table.createTHead().insertRow();
        for (const label of [this.dataset.time, ...lines.map((line) => line.label)]) {
            const cell = document.createElement("th");
            cell.scope = "col";
            cell.textContent = label;
            head.append(cell);
        }
        const body = table.createTBody();
        starts.forEach((start, index) => {
            const row = body.insertRow();
            const time = document.createElement("th");
            time.scope = "row";
            const text = this.#printStep(index).replace(" UTC", "");
            if (link) {
                const anchor = document.createElement("a");
                anchor.href = fill(link, this.#data, index);
                anchor.textContent = text;
                time.append(anchor);
            } else {
                time.textContent = text;
            }
            row.append(time);
            lines.forEach((line) => (row.insertCell().textContent = printValue(line.values[index], unit)));
        });
        keepPlace(place, table);
    }
}

const makeMark = (line) => {
    const mark = document.createElement("i");
    mark.className = `mst-line mst-line-${line.colour}`;
    return mark;
};

// A link that has the focus keeps it when its table is written anew.
const keepPlace = (place, table) => {
    const { scrollTop } = place;
    const href = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    place.replaceChildren(table);
    place.scrollTop = scrollTop;
    if (href) {
        [...table.querySelectorAll("a")].find((anchor) => anchor.getAttribute("href") === href)?.focus();
    }
};

// A value between two gaps has no line, so it is shown as a point.
const listAlone = (values) => {
    const isGap = (at) => (values[at] ?? null) === null;
    return [...values.keys()].filter((at) => !isGap(at) && isGap(at - 1) && isGap(at + 1));
};

// Below the first time and below the first one of each day stands the date.
const printTimes = (splits, every) => {
    let before = "";
    return splits.map((seconds) => {
        const at = new Date(seconds * 1000);
        const date = day.format(at);
        if (every >= DAY_S) {
            return date;
        }
        const text = date === before ? clock.format(at) : `${clock.format(at)}\n${date}`;
        before = date;
        return text;
    });
};

customElements.define("mst-chart", MusterChart);
