// Keeps a list current: asks for its page again and changes cells where they stand. Rows come, go and move only while nobody has
// a hand on them: on a first page without search and filter that nobody points at, types into or selects from.
import { followPage, update, updateChildren } from "./live.js";

const EVERY_MS = 5000;

const findTable = (page) => page.getElementById("result_list");
const findRows = (table) => [...table.querySelectorAll(":scope > tbody")];
const nameRow = (row) => row.querySelector("a[href]")?.getAttribute("href");

const isAtRest = (table) =>
    location.search === "" &&
    getSelection().isCollapsed &&
    !table.matches(":hover") &&
    !table.contains(document.activeElement) &&
    table.querySelector("input:checked") === null;

const show = (fresh) => {
    const shown = findTable(document);
    const asOf = fresh.getElementById("list-as-of");
    if (asOf) {
        update(document.getElementById("list-as-of"), asOf);
    }
    const table = findTable(fresh);
    if (!shown || !table) {
        // The first row came, or the last one went: the whole page looks different, unless somebody is typing a search.
        if (shown !== table && location.search === "" && document.activeElement === document.body) {
            location.reload();
        }
        return;
    }
    if (isAtRest(shown)) {
        updateChildren(shown, table);
        return;
    }
    const news = new Map(findRows(table).map((row) => [nameRow(row), row]));
    for (const row of findRows(shown)) {
        const same = news.get(nameRow(row));
        if (same) {
            row.querySelectorAll("td, th").forEach((cell, index) => {
                const freshCell = same.querySelectorAll("td, th")[index];
                if (freshCell && !cell.contains(document.activeElement)) {
                    updateChildren(cell, freshCell);
                }
            });
        }
    }
};

if (document.getElementById("list-as-of")) {
    followPage(EVERY_MS, show);
}
