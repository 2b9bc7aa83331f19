-- Two roles with only the rights they need. Run once as a superuser, in the database that ffd uses:
--
--   psql -d mydatabase -v ON_ERROR_STOP=1 -f roles.sql
--
-- ffd_owner owns the schema and runs `ffd migrate`; ffd_app is for workers, services and the daemon. Both are
-- created without a password: set one with \password, or use certificates or peer authentication.

do $$
begin
  if not exists (select from pg_roles where rolname = 'ffd_owner') then
    create role ffd_owner login;
  end if;
  if not exists (select from pg_roles where rolname = 'ffd_app') then
    create role ffd_app login;
  end if;
end $$;

grant create, usage on schema public to ffd_owner;
grant usage on schema public to ffd_app;

-- What ffd_owner will create, ffd_app may use: rows, never the schema itself.
alter default privileges for role ffd_owner in schema public
  grant select, insert, update, delete on tables to ffd_app;
alter default privileges for role ffd_owner in schema public
  grant usage, select on sequences to ffd_app;
alter default privileges for role ffd_owner in schema public
  grant execute on functions to ffd_app;
