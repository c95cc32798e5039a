-- PostgreSQL runs this once, when it makes its data folder: the servers' role owns their database and is no superuser.
\set password `cat /run/secrets/database_password`
CREATE ROLE muster LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'password';
CREATE DATABASE muster OWNER muster;
REVOKE CONNECT, TEMPORARY ON DATABASE muster, postgres FROM PUBLIC;
