// Follows the list of requests: new ones come on top, marked, and every row is kept current where it stands. While somebody
// has a hand on the list, or reads further down, new ones wait behind a button. The pause of the top bar holds everything.
import { followPage, update, updateChildren } from "./live.js";

const EVERY_MS = 3000;
const MOST_ROWS = 200;
const table = document.getElementById("result_list");
const rowsOf = (page) => [...(page.getElementById("result_list")?.tBodies[0]?.rows ?? [])];
let held = [];

const isInHand = () =>
    !getSelection().isCollapsed || table.matches(":hover") || table.contains(document.activeElement) || scrollY > table.offsetTop;

const mark = (row) => {
    row.classList.add("mst-new");
    row.querySelector("th small").dataset.new = table.dataset.new;
};

const addHeld = () => {
    for (const row of table.querySelectorAll(".mst-new")) {
        row.classList.remove("mst-new");
    }
    held.forEach(mark);
    table.tBodies[0].prepend(...held);
    held = [];
    rowsOf(document).slice(MOST_ROWS).forEach((row) => row.remove());
    sayHeld();
};

const sayHeld = () => {
    const note = document.querySelector("[data-held]");
    const button = note.querySelector("button");
    note.hidden = held.length === 0;
    button.textContent = held.length === 1 ? button.dataset.one : button.dataset.many.replace("%n", held.length);
};

const show = (fresh) => {
    update(document.getElementById("list-as-of"), fresh.getElementById("list-as-of"));
    const chart = document.querySelector("#histogram mst-chart");
    const data = fresh.querySelector("#histogram script[type='application/json']");
    if (chart && data && typeof chart.show === "function") {
        chart.show(JSON.parse(data.textContent));
    }
    const note = document.querySelector("#histogram > .mst-note");
    updateChildren(note, fresh.querySelector("#histogram > .mst-note"));
    if (!table || rowsOf(fresh).length === 0) {
        if (rowsOf(fresh).length > 0 && document.activeElement === document.body) {
            location.reload(); // the first one came: the whole page looks different
        }
        return;
    }
    const known = new Map([...rowsOf(document), ...held].map((row) => [row.id, row]));
    const news = [];
    for (const row of rowsOf(fresh)) {
        const shown = known.get(row.id);
        if (!shown) {
            news.push(document.importNode(row, true));
            continue;
        }
        [...shown.cells].forEach((cell, index) => {
            if (!cell.contains(document.activeElement)) {
                updateChildren(cell, row.cells[index]);
                if (index === 0 && shown.classList.contains("mst-new")) {
                    mark(shown);
                }
            }
        });
    }
    if (news.length === rowsOf(fresh).length && !isInHand()) {
        table.tBodies[0].replaceChildren(); // so many came at once that some between these and those are not known
        held = [];
    }
    held = [...news, ...held];
    if (held.length > 0 && !isInHand()) {
        addHeld();
    } else {
        sayHeld();
    }
};

if (document.querySelector("[data-follow]")) {
    followPage(EVERY_MS, show);
    document.querySelector("[data-show-held]").addEventListener("click", () => {
        addHeld();
        table.querySelector("tbody a").focus();
    });
}

// A menu closes by Escape, with the focus back on it, and by a click elsewhere.
const closeMenus = (except) => {
    for (const menu of document.querySelectorAll(".mst-filter-menu[open]")) {
        if (menu !== except) {
            menu.open = false;
        }
    }
};
document.addEventListener("click", (event) => closeMenus(event.target.closest(".mst-filter-menu")));
document.addEventListener("keydown", (event) => {
    const open = event.key === "Escape" ? document.querySelector(".mst-filter-menu[open]") : null;
    if (open) {
        open.open = false;
        open.querySelector("summary").focus();
    }
});
for (const menu of document.querySelectorAll(".mst-filter-menu")) {
    menu.addEventListener("toggle", () => {
        const box = menu.querySelector(".mst-filter-box");
        box.classList.remove("mst-to-left");
        if (menu.open) {
            box.classList.toggle("mst-to-left", box.getBoundingClientRect().right > document.documentElement.clientWidth - 8);
            menu.querySelector("input:not([type=hidden])")?.focus();
        }
    });
}
