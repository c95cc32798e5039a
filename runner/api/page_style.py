"""The looks of the page, in one constant because its digest stands in the content security policy."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1b2430; --soft: #5b6775;
  --good: #137547; --good-back: #dff3e8; --bad: #a3231b; --bad-back: #fbe4e2; --busy: #7a4b00; --busy-back: #fcefd7;
  --accent: #2457c5; --track: #e3e7ec; }
@media (prefers-color-scheme: dark) {
  :root { --back: #12161c; --card: #1a2029; --line: #2d3642; --text: #e7ebf0; --soft: #9aa7b5; --good: #6fd6a2;
    --good-back: #123525; --bad: #ff9d94; --bad-back: #431a17; --busy: #f2c377; --busy-back: #3b2a0d; --accent: #8fb4ff;
    --track: #2d3642; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
header { margin-bottom: 1.5rem; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
header p { margin: .4rem 0 0; color: var(--soft); }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.15rem; }
h3 { margin: 0; font-size: .85rem; font-weight: 600; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); gap: 1rem; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; }
.tiles strong { display: block; margin-top: .25rem; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.tiles p { margin: .5rem 0 0; color: var(--soft); font-size: .9rem; }
progress { display: block; width: 100%; height: .5rem; margin-top: .75rem; border: 0; border-radius: .25rem;
  overflow: hidden; appearance: none; background: var(--track); }
progress::-webkit-progress-bar { background: var(--track); }
progress::-webkit-progress-value { background: var(--accent); }
progress::-moz-progress-bar { background: var(--accent); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .6rem 1rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
thead th { border-top: 0; font-size: .85rem; color: var(--soft); white-space: nowrap; }
tbody th { font-weight: 600; min-width: 9rem; }
.state { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .85rem; font-weight: 600;
  white-space: nowrap; background: var(--track); color: var(--soft); }
.state.good { background: var(--good-back); color: var(--good); }
.state.bad { background: var(--bad-back); color: var(--bad); }
.state.busy { background: var(--busy-back); color: var(--busy); }
.endpoints { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1rem;
  align-items: start; grid-auto-flow: dense; }
.endpoints h3 { grid-column: 1 / -1; margin-top: .5rem; }
.endpoints ul { grid-column: 1 / -1; list-style: none; margin: 0; padding: .25rem 1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; }
.endpoints li { display: flex; flex-wrap: wrap; gap: .1rem 1rem; justify-content: space-between; padding: .5rem 0; }
.endpoints li + li { border-top: 1px solid var(--line); }
.endpoints code { font: .9rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.endpoints b { display: inline-block; min-width: 3.2rem; color: var(--soft); font-weight: 600; }
.endpoints span { color: var(--soft); font-size: .9rem; }
a { color: var(--accent); }
@media (max-width: 36rem) {
  main { padding: 1.25rem .9rem 3rem; }
  thead { position: absolute; clip-path: inset(50%); }
  tr, tbody th, td { display: block; }
  tr { padding: .6rem 1rem; }
  tr + tr { border-top: 1px solid var(--line); }
  th, td { padding: .1rem 0; border: 0; }
  .endpoints span { flex-basis: 100%; }
}
"""
