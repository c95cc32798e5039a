"""The pages of governance in the browser: approvals, policy, freeze, signing in. They parse, call one service and render."""
